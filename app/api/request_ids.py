"""A name for each request, by which a client and the log speak of the same one."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable, Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.auth import route_path
from app.logs import CURRENT, LogContext

HEADER = b"x-request-id"

_SANE = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_SESSIONS = "/sessions/"
MAX_SESSION_ID = 128


def request_ids() -> Iterator[str]:
    """Names that no other process gives. They are no secret, and a random one each would cost ten times as much."""
    process = secrets.token_hex(5)
    return (f"{process}-{number:x}" for number in itertools.count(1))


class RequestIds:
    """Passes requests on, and names them: as the client does, if that is sane.

    A reply has the name unless the engine's reply, which it is, has its own; the OpenAI SDKs show it as `_request_id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._names = request_ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = _first(scope["headers"])
        name = given if given is not None and _SANE.fullmatch(given) else next(self._names).encode()
        about = LogContext(name.decode(), _session_of(route_path(scope)))
        CURRENT.set(about)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start" and _first(message["headers"]) is None:
                message["headers"] = [*message["headers"], (HEADER, name)]
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            about.has_ended = True


def _first(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if len(name) == len(HEADER) and name.lower() == HEADER:
            return value
    return None


def _session_of(path: str) -> str | None:
    """What stands where a session's id does."""
    if not path.startswith(_SESSIONS):
        return None
    return path[len(_SESSIONS) :].partition("/")[0][:MAX_SESSION_ID] or None
