"""Every error a client can meet, as one tree.

An error carries what the OpenAI SDKs read (`status`, `code`, `type`) and whether sending the same
request again can help (`retry`: `x-should-retry`, which those SDKs obey before their own rules; None
says nothing). A message holds ids, lengths and limits, never a prompt, a completion or a secret.

    AppError
    ├── InvalidRequest          400 invalid_request       what is wrong, and where
    │   ├── Unsupported         400 unsupported           a documented choice that this version or installation lacks
    │   ├── RollbackTooDeep     400 rollback_too_deep     goes back more turns than the window
    │   └── HistoryMismatch     400 history_mismatch      is not the stored history
    ├── Unauthorized            401 unauthorized          no token, or one that is not known
    ├── Forbidden               403 forbidden             not with this token; no token set, and not this machine
    ├── SessionNotFound         404 session_not_found     an id never seen, or another's
    ├── NotFound                404 not_found             a turn, payload or refused reply that is not there
    ├── SessionClosed           404 session_closed        an id that was, and is closed or erased
    ├── RequestTimeout          408 request_timeout       the body did not come in time
    ├── SessionExists           409 session_exists        created before with another body
    │   └── SessionEnded        409 session_closed        created before, and closed or erased since
    ├── TooManySessions         409 too_many_sessions     as many below a root as a token may make
    ├── SessionBusy             409 session_busy          another turn of the session is in flight
    ├── ClaimLost               409 claim_lost            the claim was taken over meanwhile
    ├── PayloadTombstoned       410 payload_tombstoned    a replay payload behind the rollback window
    ├── RequestTooLarge         413 request_too_large
    ├── TargetTooLong           414 target_too_long       path and query
    ├── IdempotencyMismatch     422 idempotency_mismatch  the key was used with another body
    ├── HeadersTooLarge         431 headers_too_large
    ├── ClientGone              499 client_disconnected   nobody reads it; the log's reason is what counts
    ├── UpstreamInvalid         502 upstream_invalid      a 200 that is not what was asked for
    ├── WorkerCrash             502 worker_crash          two processes in turn died over the reply
    ├── EnginesFailed           502 engines_failed        an order did not reach every engine
    ├── UpstreamUnreachable     502 upstream_unreachable
    ├── SessionOpenFailed       502 session_open_failed   an engine did not open the session that the client asked for
    ├── UpstreamTimeout         504 upstream_timeout
    ├── NoUpstream              503 no_upstream
    ├── GenerationAborted       503 generation_aborted    an engine ended it before its time, and the policy is `fail`
    ├── Overloaded              503 overloaded            past a bound; try again later
    │   └── BodyGivenUp         503 overloaded            the body came slowly, and its room was needed
    ├── StoreUnavailable        503 store_unavailable
    │   ├── StoreLost           503 store_unavailable     the database's file was deleted or replaced; the process ends
    │   ├── StoreLocked         503 store_unavailable     another program holds the database's lock
    │   └── StoreDamaged        503 store_unavailable     a damaged page that is of no single session
    ├── StoreFull               507 store_full
    ├── TokenPrefixMismatch     500 token_prefix_mismatch the prompt's tokens are not the stored or sent ones
    └── SessionUnreadable       500 session_unreadable    this one session's log or content is damaged

`StartupError` is no reply: it stops the process with one line, or one for each wrong setting.
"""

from __future__ import annotations

from typing import Any, ClassVar


class AppError(Exception):
    """An answer that is not the one asked for. Subclasses fix the status and the code."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
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


class InvalidRequest(AppError):
    status, code, type, retry = 400, "invalid_request", "invalid_request_error", False


class Unsupported(InvalidRequest):
    code = "unsupported"


class RollbackTooDeep(InvalidRequest):
    code = "rollback_too_deep"


class HistoryMismatch(InvalidRequest):
    code = "history_mismatch"


class Unauthorized(AppError):
    status, code, type, retry = 401, "unauthorized", "authentication_error", False

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "www-authenticate": "Bearer"}


class Forbidden(AppError):
    status, code, type, retry = 403, "forbidden", "permission_error", False


class SessionNotFound(AppError):
    status, code, type, retry = 404, "session_not_found", "invalid_request_error", False


class SessionClosed(AppError):
    status, code, type, retry = 404, "session_closed", "invalid_request_error", False


class NotFound(AppError):
    status, code, type, retry = 404, "not_found", "invalid_request_error", False


class RequestTimeout(AppError):
    """The connection is closed: what is left of the body would be taken for the next request."""

    status, code, type = 408, "request_timeout", "invalid_request_error"

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "connection": "close"}


class SessionExists(AppError):
    status, code, type, retry = 409, "session_exists", "invalid_request_error", False


class SessionEnded(SessionExists):
    """An id is never used again."""

    code = "session_closed"


class TooManySessions(AppError):
    """Those that there are go on."""

    status, code, type, retry = 409, "too_many_sessions", "invalid_request_error", False


class SessionBusy(AppError):
    status, code, type, retry = 409, "session_busy", "conflict_error", False


class ClaimLost(AppError):
    """The turn was generated, but the claim had passed on; a marked retry finds the truth in the log."""

    status, code, type, retry = 409, "claim_lost", "conflict_error", True


class PayloadTombstoned(AppError):
    status, code, type, retry = 410, "payload_tombstoned", "invalid_request_error", False


class RequestTooLarge(AppError):
    status, code, type, retry = 413, "request_too_large", "invalid_request_error", False


class TargetTooLong(AppError):
    status, code, type, retry = 414, "target_too_long", "invalid_request_error", False


class HeadersTooLarge(AppError):
    status, code, type, retry = 431, "headers_too_large", "invalid_request_error", False


class IdempotencyMismatch(AppError):
    status, code, type, retry = 422, "idempotency_mismatch", "invalid_request_error", False


class ClientGone(AppError):
    status, code, type = 499, "client_disconnected", "invalid_request_error"


class UpstreamInvalid(AppError):
    """A rule of the reply's shape was broken; generating again may well give a sound one."""

    status, code, type = 502, "upstream_invalid", "upstream_error"


class WorkerCrash(AppError):
    """Judging the reply ended two processes one after the other: nothing of it can be believed."""

    status, code, type = 502, "worker_crash", "upstream_error"


class EnginesFailed(AppError):
    """The gate is as it was asked for; what became of the order at each engine stands beside the error."""

    status, code, type = 502, "engines_failed", "upstream_error"


class UpstreamUnreachable(AppError):
    status, code, type = 502, "upstream_unreachable", "upstream_error"


class SessionOpenFailed(AppError):
    """`nvext.session_control`: nothing was sent to the engine beyond that, and no engine is bound."""

    status, code, type = 502, "session_open_failed", "upstream_error"


class UpstreamTimeout(AppError):
    status, code, type = 504, "upstream_timeout", "upstream_error"


class NoUpstream(AppError):
    status, code, type = 503, "no_upstream", "upstream_error"
    retry_after_s = 5


class GenerationAborted(AppError):
    status, code, type = 503, "generation_aborted", "upstream_error"
    retry_after_s = 1


class Overloaded(AppError):
    status, code, type = 503, "overloaded", "server_error"
    retry_after_s = 1


class BodyGivenUp(Overloaded):
    """The connection is closed, as after RequestTimeout."""

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "connection": "close"}


class StoreUnavailable(AppError):
    status, code, type = 503, "store_unavailable", "server_error"
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
    retry_after_s = 30


class TokenPrefixMismatch(AppError):
    """The tokens do not line up; nothing is committed, because what would be trained on was never seen so."""

    status, code, type, retry = 500, "token_prefix_mismatch", "server_error", False


class SessionUnreadable(AppError):
    """Nothing is guessed, and no other session is touched."""

    status, code, type, retry = 500, "session_unreadable", "server_error", False


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
