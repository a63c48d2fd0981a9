"""What each error code means, for people who read the document."""

from __future__ import annotations

from collections.abc import Mapping

ERRORS: Mapping[str, str] = {
    "internal_error": "a fault of Turnlog's; the server's log has it",
    "invalid_request": "JSON, shape or a parameter",
    "unsupported": "a documented choice that this version lacks",
    "rollback_too_deep": "the history goes back further than the rollback window",
    "history_mismatch": "the history is not the stored one, or has nothing sampled in common with it",
    "unauthorized": "no token, or one that is not known",
    "forbidden": "a session's token where the admin's is needed; without tokens, a client that is not this machine",
    "session_not_found": "an id never seen, or another's",
    "not_found": "what the path or the body names is not there",
    "session_closed": "closed or erased",
    "session_exists": "created before, with another body",
    "too_many_sessions": "the rollout has as many sessions below its root as a session's token may make",
    "session_busy": "another turn of the session is in flight",
    "claim_lost": "the claim passed to another process meanwhile",
    "payload_tombstoned": "a replay payload behind the rollback window",
    "request_timeout": "the body did not come in time",
    "request_too_large": "past `TURNLOG_MAX_REQUEST_BYTES`",
    "target_too_long": "path and query are too long",
    "idempotency_mismatch": "the key was used with another body",
    "headers_too_large": "the headers are too large",
    "client_disconnected": "in the log only",
    "token_prefix_mismatch": "the prompt's tokens are not the stored or sent ones",
    "session_unreadable": "this session's log or content is damaged; others are not affected",
    "upstream_invalid": "a reply of the engine's that is not what was asked for",
    "worker_crash": "two worker processes in turn ended over the reply",
    "engines_failed": "the gate is as it was asked for, but not every engine took the order: see `engines`",
    "upstream_unreachable": "no connection to an engine, or one that broke",
    "session_open_failed": "an engine did not open the session of `nvext.session_control`",
    "no_upstream": "there is no engine",
    "generation_aborted": "the generation was aborted, and `on_abort` is `fail`",
    "overloaded": "past a bound; try again later",
    "store_unavailable": "the database cannot answer or commit",
    "upstream_timeout": "the engine took too long",
    "store_full": "the disk or the database is full",
}
