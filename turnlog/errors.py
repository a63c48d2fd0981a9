"""The client's errors, as one tree.

`status` and `code` are the server's (`/docs` lists the codes); both are None without a reply of Turnlog. Messages
contain ids, lengths and limits, never content.

TurnlogError
├── Unreachable          no connection, a broken one, or no reply in time; the retries are used up
├── NotTurnlog           a reply that is not Turnlog's: another service, or a proxy's page
├── InvalidRequest       400, 413, 414, 422, 431
├── Unauthorized         401  no token, or an unknown one
├── Forbidden            403  a session's token on a route that needs the admin token
├── NotFound             404, 410
│   ├── SessionClosed    404 session_closed: closed or erased
│   └── PositionGone     410 position_gone: the log is not the one that was read; begin anew
├── Conflict             409
│   └── Restored         409 restored: later than the checkpoint to which the run, or the store, was taken back
├── EnginesFailed        502 engines_failed: the gate is as requested; `body` gives the result at each engine
└── Unavailable          429 and any other 5xx: `retry_after_s` is when to retry, if the server says so
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class TurnlogError(Exception):
    """`body` is the reply's JSON object, empty if there is none."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        body: Mapping[str, Any] | None = None,
        should_retry: bool | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.body: Mapping[str, Any] = body or {}
        self.should_retry = should_retry
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message if self.code is None else f"{self.status} {self.code}: {self.message}"


class Unreachable(TurnlogError):
    pass


class NotTurnlog(TurnlogError):
    pass


class InvalidRequest(TurnlogError):
    pass


class Unauthorized(TurnlogError):
    pass


class Forbidden(TurnlogError):
    pass


class NotFound(TurnlogError):
    pass


class SessionClosed(NotFound):
    pass


class PositionGone(NotFound):
    pass


class Conflict(TurnlogError):
    pass


class Restored(Conflict):
    pass


class EnginesFailed(TurnlogError):
    pass


class Unavailable(TurnlogError):
    pass


_BY_CODE: Mapping[tuple[int, str], type[TurnlogError]] = {
    (404, "session_closed"): SessionClosed,
    (410, "position_gone"): PositionGone,
    (409, "restored"): Restored,
    (502, "engines_failed"): EnginesFailed,
}

_BY_STATUS: Mapping[int, type[TurnlogError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: NotFound,
    413: InvalidRequest,
    414: InvalidRequest,
    422: InvalidRequest,
    429: Unavailable,
    431: InvalidRequest,
}


def refusal(status: int, headers: Mapping[str, str], content: bytes) -> TurnlogError:
    """The error of an unsuccessful reply. Header names may be in any case."""
    body = _object(content)
    error = body.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    should = headers.get("x-should-retry")
    should_retry = None if should is None else should == "true"
    after = _seconds(headers.get("retry-after"))
    if not isinstance(error, dict) or not isinstance(code, str):
        message = f"{status} without Turnlog's error format: is this the address of a Turnlog server?"
        return NotTurnlog(message, status=status, body=body, should_retry=should_retry, retry_after_s=after)
    kind = _BY_CODE.get((status, code)) or _BY_STATUS.get(status) or (Unavailable if status >= 500 else TurnlogError)
    return kind(
        str(error.get("message")), status=status, code=code, body=body, should_retry=should_retry, retry_after_s=after
    )


def _object(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isdecimal() else None
