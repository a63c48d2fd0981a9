"""Defines every error that a client can get, as one tree.

An error carries what the OpenAI SDKs read: `status`, `code` and `type`. `retry` says whether a retry of the
same request can succeed; it becomes the header `x-should-retry`, which those SDKs obey before their own rules. If it
is None, the header is not sent. A message holds ids, lengths and limits, never a prompt, a completion or a secret.

`StartupError` is not sent to clients: it stops the process with one line, or one for each wrong setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from app.domain.events import LimitName


class AppError(Exception):
    """An error reply. Subclasses set the status and the code."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    meaning: ClassVar[str] = "an error in Turnlog itself: see the server's log"
    """Of the code, in the OpenAPI document."""
    details: ClassVar[Mapping[str, str] | None] = None
    """What a client of the Messages API acts on."""
    type: ClassVar[str] = "server_error"
    retry: bool | None = None
    retry_after_s: int | None = None

    def body(self) -> dict[str, Any]:
        """The reply's JSON object, as the OpenAI SDKs read it."""
        return {"error": {"message": str(self), "type": self.type, "code": self.code, "param": None}}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        return headers


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that has been answered, and of those before it.

    Their frames hold the request, and many hold the error again: in a local that was raised, or in a task that failed.
    Such a cycle would keep a large body until a full collection, which is rare (`main._calm_collector`).
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def codes(error: type[AppError] = AppError) -> dict[str, str]:
    """The codes of an error and of all below it, and what they mean."""
    meanings = {error.code: error.meaning}
    for below in error.__subclasses__():
        meanings |= codes(below)
    return meanings


class InvalidRequest(AppError):
    status, code, type, retry = 400, "invalid_request", "invalid_request_error", False
    meaning = "the message says what is wrong, and where"


class Unsupported(InvalidRequest):
    code = "unsupported"
    meaning = "documented, but not available in this version or installation (`format=parquet` without pyarrow)"


class ThreadUnsupported(Unsupported):
    """The tool runners of Anthropic's packages ask for a thread, and go on without one after this error alone."""

    details: ClassVar[Mapping[str, str]] = {"error_code": "thread_unsupported_request"}


class PreviousResponseNotFound(InvalidRequest):
    code = "previous_response_not_found"
    meaning = "`previous_response_id` names no response of this session"


class RollbackTooDeep(InvalidRequest):
    code = "rollback_too_deep"
    meaning = "the history goes back further than the rollback window"

    @classmethod
    def of(cls, why: str, window: int) -> RollbackTooDeep:
        return cls(
            f"{why}; the session's rollback window is {window}. Create the session with a larger rollback_window, "
            'or with history="tree", where such a request is a branch and discards nothing'
        )


class HistoryMismatch(InvalidRequest):
    code = "history_mismatch"
    meaning = (
        "an assistant message that the session did not produce there, or nothing sampled in common with the history"
    )

    @classmethod
    def of(cls, why: str) -> HistoryMismatch:
        return cls(
            f'{why}. Create the session with history="tree", where each conversation is a branch, or a session for '
            "each conversation"
        )


class Unauthorized(AppError):
    status, code, type, retry = 401, "unauthorized", "authentication_error", False
    meaning = "no token, or an unknown one"

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "www-authenticate": "Bearer"}


class Forbidden(AppError):
    status, code, type, retry = 403, "forbidden", "permission_error", False
    meaning = "the token does not allow it; or no token is set and the client is on another machine"


class SessionNotFound(AppError):
    status, code, type, retry = 404, "session_not_found", "invalid_request_error", False
    meaning = "the id was never used; or, with a session token, belongs to another session"
    session_id: str | None = None

    @classmethod
    def of(cls, session_id: str) -> SessionNotFound:
        error = cls(f"session {session_id} does not exist")
        error.session_id = session_id
        return error


class SessionArchived(SessionNotFound):
    code = "session_archived"
    meaning = "the session is in a file that the message names; `turnlog import` brings it back"


_CLOSED = "the session or its run was closed or erased, also during the turn"


class SessionClosed(AppError):
    status, code, type, retry = 404, "session_closed", "invalid_request_error", False
    meaning = _CLOSED

    @classmethod
    def of(cls, session_id: str, became: str) -> Self:
        """`became`: closed, and how, or erased."""
        where = f"GET /sessions/{session_id}/messages and /export?session_id={session_id} still have its content"
        return cls(f"session {session_id} {became}" + ("" if became.endswith("erased") else f"; {where}"))


class SessionReclaimed(SessionClosed):
    """The agent is told that the server gave its session up, not that it was wrong about the id."""

    status, code = 410, "session_reclaimed"
    meaning = "the janitor closed the session, which was idle for `TURNLOG_IDLE_CLOSE_S`"


class GenerationEnded(SessionClosed):
    """It was closed before the request came, which begins the next generation if it names the session in a header."""


class NotFound(AppError):
    status, code, type, retry = 404, "not_found", "invalid_request_error", False
    meaning = "a turn, payload, group, run, engine or adapter that the request names does not exist, or no such path"

    @classmethod
    def of_run(cls, run: str) -> Self:
        return cls(f"run {run:.128} does not exist")


class MethodNotAllowed(AppError):
    status, code, type = 405, "method_not_allowed", "invalid_request_error"
    meaning = "the path has other methods, which `allow` lists"
    methods: Sequence[str] = ()

    @classmethod
    def of(cls, method: str, path: str, methods: Sequence[str]) -> MethodNotAllowed:
        error = cls(f"{method} is not supported on {path}; supported: {', '.join(methods)}")
        error.methods = methods
        return error

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "allow": ", ".join(self.methods)}


class RequestTimeout(AppError):
    """The connection is closed: the rest of the body would be parsed as the next request."""

    status, code, type = 408, "request_timeout", "invalid_request_error"
    meaning = (
        "the body arrived too slowly: less than 30 KiB in 30 s, or not all of it within 600 s; the connection is closed"
    )

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "connection": "close"}


class SessionExists(AppError):
    status, code, type, retry = 409, "session_exists", "invalid_request_error", False
    meaning = "created earlier with another body"


class RunMismatch(AppError):
    status, code, type, retry = 409, "run_mismatch", "invalid_request_error", False
    meaning = "the session or engine belongs to another run than the request names"


class IdUnavailable(AppError):
    """Says nothing of the session that has the id."""

    status, code, type, retry = 409, "id_unavailable", "invalid_request_error", False
    meaning = (
        "with a run's token: the id, or the engine, is taken outside the run; a session without `session_id` gets a "
        "free one"
    )

    @classmethod
    def of(cls, session_id: str) -> Self:
        return cls(f"the id {session_id} is not available")


class SessionEnded(SessionExists):
    """The id cannot be used again."""

    code = "session_closed"
    meaning = _CLOSED


class RunClosed(AppError):
    status, code, type, retry = 409, "session_closed", "invalid_request_error", False
    meaning = _CLOSED

    @classmethod
    def of(cls, run: str, status: str) -> Self:
        """`status`: closed, or erasing."""
        return cls(f"run {run} is {'being erased' if status == 'erasing' else 'closed'}")


class AlreadyFinished(AppError):
    status, code, type, retry = 409, "session_finished", "invalid_request_error", False
    meaning = "`POST …/finish` has ended the session's turns; or its snapshot is not the one that the request names"


class SessionChanged(AppError):
    """What has come since would be closed unseen."""

    status, code, type, retry = 412, "session_changed", "invalid_request_error", False
    meaning = "a turn has been opened or committed since `/samples` gave the revision that `DELETE` names"


class TooManySessions(AppError):
    status, code, type, retry = 409, "too_many_sessions", "invalid_request_error", False
    meaning = (
        "a session's token names a new agent, and its rollout has `TURNLOG_MAX_AGENT_SESSIONS` sessions below its root"
    )


class TooManyTurns(AppError):
    status, code, type, retry = 409, "too_many_turns", "invalid_request_error", False
    meaning = "the session has as many turns as `TURNLOG_MAX_TURNS` allows"


class OverBudget(AppError):
    """`limit` is the session's limit that was reached; `sampled`: the tokens that were generated in vain."""

    status, code, type, retry = 409, "over_budget", "invalid_request_error", False
    meaning = "a limit of the session, of its rollout or of its run is reached: `limits`"
    limit: LimitName
    sampled: int = 0

    @classmethod
    def of(cls, session_id: str, limit: LimitName, sampled: int = 0) -> OverBudget:
        error = cls(f"session {session_id} has reached its limit on {limit}")
        error.limit, error.sampled = limit, sampled
        return error


class RunOverBudget(AppError):
    status, code, type, retry = OverBudget.status, OverBudget.code, OverBudget.type, OverBudget.retry
    meaning = OverBudget.meaning

    @classmethod
    def of(cls, run: str, limit: str, used: int, most: int) -> Self:
        return cls(f"run {run} has reached its limit on {limit}: {used} of {most}")


class SessionBusy(AppError):
    status, code, type, retry = 409, "session_busy", "conflict_error", False
    meaning = (
        "another turn of the session is in flight. To be retried: a tree has `TURNLOG_MAX_OPEN_TURNS` turns in "
        "flight, or turns in flight have reserved what is left of a limit"
    )


class Restored(AppError):
    """The run, or the store, was taken back to a checkpoint: the session, or a turn that the request carries, is
    undone."""

    status, code, type, retry = 409, "restored", "conflict_error", False
    meaning = "the session, or a turn in the request's history, is later than the checkpoint that was restored"

    @classmethod
    def of(cls, session_id: str, turn: int | None = None) -> Restored:
        what = f"session {session_id}" if turn is None else f"turn {turn} of session {session_id}"
        return cls(f"{what} is undone: the run, or the store, was restored to an earlier checkpoint")


class CheckpointExists(AppError):
    status, code, type, retry = 409, "checkpoint_exists", "conflict_error", False
    meaning = "another checkpoint has this name"


class ArchiveBusy(AppError):
    status, code, type, retry = 409, "archive_busy", "conflict_error", True
    meaning = "another process is archiving or importing"


class CheckpointBusy(AppError):
    status, code, type, retry = 409, "checkpoint_busy", "conflict_error", True
    meaning = "a restore is running, or turns are draining for a checkpoint or did not end in time"
    retry_after_s = 2


class PauseEnded(AppError):
    status, code, type, retry = 409, "pause_ended", "conflict_error", False
    meaning = "the pause that `renews` names has ended"


class ClaimLost(AppError):
    """The turn was generated, but another process holds the claim now. A marked retry gets the outcome from the log."""

    status, code, type, retry = 409, "claim_lost", "conflict_error", True
    meaning = "another process took the claim over during the turn; nothing was written"


class PayloadTombstoned(AppError):
    status, code, type, retry = 410, "payload_tombstoned", "invalid_request_error", False
    meaning = "a replay payload outside the rollback window; the message names kind, rows, shape and the event"


class PositionGone(AppError):
    """What the reader has of the log may differ from the log: it must begin anew."""

    status, code, type, retry = 410, "position_gone", "invalid_request_error", False
    meaning = "the store was restored from a backup since the position was given, or a database crash undid its event"


class RequestTooLarge(AppError):
    status, code, type, retry = 413, "request_too_large", "invalid_request_error", False
    meaning = "past `TURNLOG_MAX_REQUEST_BYTES`; on routes that take no turn, past 1 MiB"


class UnsupportedEncoding(AppError):
    status, code, type, retry = 415, "unsupported_encoding", "invalid_request_error", False
    meaning = "the body's `Content-Encoding` is not `gzip`, `deflate` or `zstd`"

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "accept-encoding": "gzip, deflate, zstd"}


class TargetTooLong(AppError):
    status, code, type, retry = 414, "target_too_long", "invalid_request_error", False
    meaning = "path and query have more than 16 KiB together"


class HeadersTooLarge(AppError):
    status, code, type, retry = 431, "headers_too_large", "invalid_request_error", False
    meaning = "the headers have more than 64 KiB"


class UpgradeRequired(AppError):
    status, code, type = 426, "upgrade_required", "invalid_request_error"
    meaning = "a WebSocket request on the route of a turn: use `POST`"

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "upgrade": "HTTP/1.1", "connection": "upgrade"}


class IdempotencyMismatch(AppError):
    status, code, type, retry = 422, "idempotency_mismatch", "invalid_request_error", False
    meaning = "the key was used with another body"


class ClientGone(AppError):
    status, code, type = 499, "client_disconnected", "invalid_request_error"
    meaning = "for the log only: the client is gone"


class UpstreamInvalid(AppError):
    """The engine's reply failed validation; another generation may succeed."""

    status, code, type = 502, "upstream_invalid", "upstream_error"
    meaning = "a 200 that lacks what was asked for, is malformed, too large or a redirect"


class GenerationFailed(UpstreamInvalid):
    """The engine told in a 200 that it failed: the client gets what it told, as if it had come with this status."""

    told_status = 502
    told = b""

    @classmethod
    def of(cls, engine: str, status: int, told: bytes) -> GenerationFailed:
        error = cls(f"{engine} ended the generation with an error")
        error.told_status, error.told = status, told
        return error


class WorkerCrash(AppError):
    """Validating the reply crashed two worker processes in a row, so the reply is discarded."""

    status, code, type = 502, "worker_crash", "upstream_error"
    meaning = "two worker processes in a row died, hung or ran out of memory over the reply"


class UpstreamUnauthorized(AppError):
    """The client's own token is right: it must not look for another."""

    status, code, type, retry = 502, "upstream_unauthorized", "upstream_error", False
    meaning = "a text upstream refused the key that `TURNLOG_TEXT_UPSTREAMS` has for it"


class EnginesFailed(AppError):
    """The gate is in the requested state. The body lists each engine's result beside the error."""

    status, code, type = 502, "engines_failed", "upstream_error"
    meaning = "a pause or resume did not succeed on every engine; `engines`, beside the error, has each one's result"


class UpstreamUnreachable(AppError):
    status, code, type = 502, "upstream_unreachable", "upstream_error"
    meaning = "no connection to an engine, or one that broke"


class SessionOpenFailed(AppError):
    """`nvext.session_control` failed: no generation was sent, and the session is bound to no engine."""

    status, code, type = 502, "session_open_failed", "upstream_error"
    meaning = "an engine did not open the session of `nvext.session_control`; nothing was bound or generated"


class UpstreamTimeout(AppError):
    status, code, type = 504, "upstream_timeout", "upstream_error"
    meaning = "the engine took longer than `TURNLOG_UPSTREAM_TIMEOUT_S`"


class NoUpstream(AppError):
    status, code, type = 503, "no_upstream", "upstream_error"
    meaning = (
        "no engine is in `TURNLOG_UPSTREAMS` or was added; or a session's text upstream is no longer in "
        "`TURNLOG_TEXT_UPSTREAMS`"
    )
    retry_after_s = 5


class GenerationAborted(AppError):
    status, code, type = 503, "generation_aborted", "upstream_error"
    meaning = "an engine aborted the generation, and `on_abort` is `fail`"
    retry_after_s = 1


class Overloaded(AppError):
    status, code, type = 503, "overloaded", "server_error"
    meaning = "`TURNLOG_INFLIGHT_BYTES` or a share of it, a queue of the server, or its file descriptors are used up"
    retry_after_s = 1


class BodyGivenUp(Overloaded):
    """The rest of the body is dropped, so that its client can read this."""


class StoreUnavailable(AppError):
    status, code, type = 503, "store_unavailable", "server_error"
    meaning = (
        "the database could not answer or commit within some seconds; a marked retry finds out whether the "
        "turn was committed"
    )
    retry_after_s: int | None = 2


class StoreDamaged(StoreUnavailable):
    """The database answers, but a page that several sessions need cannot be read. A retry does not help."""

    status, code = 500, "store_damaged"
    meaning = "a page of the database that several sessions need is damaged: `turnlog verify` names what is lost"
    retry = False
    retry_after_s = None


class StoreLost(StoreUnavailable):
    """Nothing more is written and this process ends, so that the next one finds all that was acknowledged."""


class StoreLocked(StoreUnavailable):
    """Another program held the database's lock during the whole wait; nothing was written."""


class PayloadsUnavailable(StoreUnavailable):
    """The turn is not committed. Its generation is lost, as with `store_unavailable`."""

    code = "payloads_unavailable"
    meaning = "object storage did not answer for `TURNLOG_PAYLOADS_TIMEOUT_S`; the turn is not committed"


class StoreFull(AppError):
    status, code, type = 507, "store_full", "server_error"
    meaning = "the disk or the database is full; a new session past `TURNLOG_MAX_DB_BYTES`"
    retry_after_s = 30


class TokenPrefixMismatch(AppError):
    """Nothing is committed: the engine never saw the token sequence that would be trained on."""

    status, code, type, retry = 500, "token_prefix_mismatch", "server_error", False
    meaning = (
        "the engine reports another prompt than the ids it was sent, or with `on_drift: reject` one "
        "that does not continue the stored tokens"
    )


class SessionUnreadable(AppError):
    """Nothing is guessed, and no other session is affected."""

    status, code, type, retry = 500, "session_unreadable", "server_error", False
    meaning = "the log or content of this session is damaged, or newer than this version; others are not affected"


class StartupError(Exception):
    """The service cannot start. `lines` are for the operator: one, or one for each wrong setting."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.lines = lines

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def under(self, name: str) -> str:
        """The lines, each with the program's `name` before it."""
        return "\n".join(f"{name}: {line}" for line in self.lines)
