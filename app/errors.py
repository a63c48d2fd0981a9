"""Every error a client can meet, as one tree.

An error carries what the OpenAI SDKs read (`status`, `code`, `type`) and whether sending the same
request again can help (`retry`: `x-should-retry`, which those SDKs obey before their own rules; None
says nothing). A message holds ids, lengths and limits, never a prompt, a completion or a secret.

`StartupError` is no reply: it stops the process with one line, or one for each wrong setting.
"""

from __future__ import annotations

from typing import Any, ClassVar


class AppError(Exception):
    """An answer that is not the one asked for. Subclasses fix the status and the code."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    meaning: ClassVar[str] = "a fault of Turnlog's; the server's log has it"
    """Of the code, in the OpenAPI document."""
    type: ClassVar[str] = "server_error"
    retry: bool | None = None
    retry_after_s: int | None = None

    def body(self) -> dict[str, Any]:
        """The JSON object that the OpenAI SDKs read."""
        return {"error": {"message": str(self), "type": self.type, "code": self.code, "param": None}}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        return headers


def codes(error: type[AppError] = AppError) -> dict[str, str]:
    """The codes of an error and of all below it, and what they mean."""
    found = {error.code: error.meaning}
    for below in error.__subclasses__():
        found |= codes(below)
    return found


class InvalidRequest(AppError):
    status, code, type, retry = 400, "invalid_request", "invalid_request_error", False
    meaning = "JSON, shape or a parameter"


class Unsupported(InvalidRequest):
    code = "unsupported"
    meaning = "a documented choice that this version lacks"


class RollbackTooDeep(InvalidRequest):
    code = "rollback_too_deep"
    meaning = "the history goes back further than the rollback window"


class HistoryMismatch(InvalidRequest):
    code = "history_mismatch"
    meaning = "the history is not the stored one, or has nothing sampled in common with it"


class Unauthorized(AppError):
    status, code, type, retry = 401, "unauthorized", "authentication_error", False
    meaning = "no token, or one that is not known"

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "www-authenticate": "Bearer"}


class Forbidden(AppError):
    status, code, type, retry = 403, "forbidden", "permission_error", False
    meaning = "a session's token where the admin's is needed; without tokens, a client that is not this machine"


class SessionNotFound(AppError):
    status, code, type, retry = 404, "session_not_found", "invalid_request_error", False
    meaning = "an id never seen, or another's"


class SessionClosed(AppError):
    status, code, type, retry = 404, "session_closed", "invalid_request_error", False
    meaning = "closed or erased"


class NotFound(AppError):
    status, code, type, retry = 404, "not_found", "invalid_request_error", False
    meaning = "what the path or the body names is not there"


class RequestTimeout(AppError):
    """The connection is closed: what is left of the body would be taken for the next request."""

    status, code, type = 408, "request_timeout", "invalid_request_error"
    meaning = "the body did not come in time"

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "connection": "close"}


class SessionExists(AppError):
    status, code, type, retry = 409, "session_exists", "invalid_request_error", False
    meaning = "created before, with another body"


class SessionEnded(SessionExists):
    """An id is never used again."""

    code = "session_closed"
    meaning = "closed or erased"


class TooManySessions(AppError):
    """Those that there are go on."""

    status, code, type, retry = 409, "too_many_sessions", "invalid_request_error", False
    meaning = "the rollout has as many sessions below its root as a session's token may make"


class SessionBusy(AppError):
    status, code, type, retry = 409, "session_busy", "conflict_error", False
    meaning = "another turn of the session is in flight"


class ClaimLost(AppError):
    """The turn was generated, but the claim had passed on; a marked retry finds the truth in the log."""

    status, code, type, retry = 409, "claim_lost", "conflict_error", True
    meaning = "the claim passed to another process meanwhile"


class PayloadTombstoned(AppError):
    status, code, type, retry = 410, "payload_tombstoned", "invalid_request_error", False
    meaning = "a replay payload behind the rollback window"


class RequestTooLarge(AppError):
    status, code, type, retry = 413, "request_too_large", "invalid_request_error", False
    meaning = "past `TURNLOG_MAX_REQUEST_BYTES`"


class TargetTooLong(AppError):
    status, code, type, retry = 414, "target_too_long", "invalid_request_error", False
    meaning = "path and query are too long"


class HeadersTooLarge(AppError):
    status, code, type, retry = 431, "headers_too_large", "invalid_request_error", False
    meaning = "the headers are too large"


class IdempotencyMismatch(AppError):
    status, code, type, retry = 422, "idempotency_mismatch", "invalid_request_error", False
    meaning = "the key was used with another body"


class ClientGone(AppError):
    status, code, type = 499, "client_disconnected", "invalid_request_error"
    meaning = "in the log only"


class UpstreamInvalid(AppError):
    """A rule of the reply's shape was broken; generating again may well give a sound one."""

    status, code, type = 502, "upstream_invalid", "upstream_error"
    meaning = "a reply of the engine's that is not what was asked for"


class WorkerCrash(AppError):
    """Judging the reply ended two processes one after the other: nothing of it can be believed."""

    status, code, type = 502, "worker_crash", "upstream_error"
    meaning = "two worker processes in turn ended over the reply"


class EnginesFailed(AppError):
    """The gate is as it was asked for; what became of the order at each engine stands beside the error."""

    status, code, type = 502, "engines_failed", "upstream_error"
    meaning = "the gate is as it was asked for, but not every engine took the order: see `engines`"


class UpstreamUnreachable(AppError):
    status, code, type = 502, "upstream_unreachable", "upstream_error"
    meaning = "no connection to an engine, or one that broke"


class SessionOpenFailed(AppError):
    """`nvext.session_control`: nothing was sent to the engine beyond that, and no engine is bound."""

    status, code, type = 502, "session_open_failed", "upstream_error"
    meaning = "an engine did not open the session of `nvext.session_control`"


class UpstreamTimeout(AppError):
    status, code, type = 504, "upstream_timeout", "upstream_error"
    meaning = "the engine took too long"


class NoUpstream(AppError):
    status, code, type = 503, "no_upstream", "upstream_error"
    meaning = "there is no engine"
    retry_after_s = 5


class GenerationAborted(AppError):
    status, code, type = 503, "generation_aborted", "upstream_error"
    meaning = "the generation was aborted, and `on_abort` is `fail`"
    retry_after_s = 1


class Overloaded(AppError):
    status, code, type = 503, "overloaded", "server_error"
    meaning = "past a bound; try again later"
    retry_after_s = 1


class BodyGivenUp(Overloaded):
    """The connection is closed, as after RequestTimeout."""

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "connection": "close"}


class StoreUnavailable(AppError):
    status, code, type = 503, "store_unavailable", "server_error"
    meaning = "the database cannot answer or commit"
    retry_after_s: int | None = 2


class StoreDamaged(StoreUnavailable):
    """The database answers, but a page that more than one session needs cannot be read: asking again does not help."""

    retry = False
    retry_after_s = None


class StoreLost(StoreUnavailable):
    """Nothing more is written, and this process ends: what is acknowledged must be found by the next one."""


class StoreLocked(StoreUnavailable):
    """Another program held the database's lock for as long as a write waits; nothing was written."""


class StoreFull(AppError):
    status, code, type = 507, "store_full", "server_error"
    meaning = "the disk or the database is full"
    retry_after_s = 30


class TokenPrefixMismatch(AppError):
    """The tokens do not line up; nothing is committed, because what would be trained on was never seen so."""

    status, code, type, retry = 500, "token_prefix_mismatch", "server_error", False
    meaning = "the prompt's tokens are not the stored or sent ones"


class SessionUnreadable(AppError):
    """Nothing is guessed, and no other session is touched."""

    status, code, type, retry = 500, "session_unreadable", "server_error", False
    meaning = "this session's log or content is damaged; others are not affected"


class StartupError(Exception):
    """The service cannot start. Its `lines` are what an operator reads: one, or one for each wrong setting."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.lines = lines

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def under(self, name: str) -> str:
        """The lines as the program of this name says them."""
        return "\n".join(f"{name}: {line}" for line in self.lines)
