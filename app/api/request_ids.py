"""Gives each request an id, which the client and the log share."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterable, Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.auth import route_path
from app.logs import CURRENT, LogContext

HEADER = b"x-request-id"
ANTHROPICS = b"request-id"
"""The header that Anthropic's SDKs read."""

_VALID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_SESSIONS = "/sessions/"
_MESSAGES = "/v1/messages"
MAX_SESSION_ID = 128


def request_ids() -> Iterator[str]:
    """Ids that no other process gives. They are not secret; a random id each would cost ten times as much."""
    process = secrets.token_hex(5)
    return (f"{process}-{number:x}" for number in itertools.count(1))


class RequestIds:
    """ASGI middleware that gives each request an id: the client's own `x-request-id` if it is valid.

    The reply gets the id unless it passes on an engine's own. The OpenAI SDKs show it as `_request_id`; Anthropic's do
    so with `request-id`, which replies of Messages get too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._ids = request_ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = _first(scope["headers"])
        request_id = given if given is not None and _VALID.fullmatch(given) else next(self._ids).encode()
        path = route_path(scope)
        context = LogContext(request_id.decode(), _session_of(path))
        CURRENT.set(context)
        own = (HEADER, ANTHROPICS) if _MESSAGES in path else (HEADER,)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message["headers"]
                missing = [(name, request_id) for name in own if _first(headers, name) is None]
                message["headers"] = [*headers, *missing]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            context.has_ended = True


def _first(headers: Iterable[tuple[bytes, bytes]], wanted: bytes = HEADER) -> bytes | None:
    for name, value in headers:
        if len(name) == len(wanted) and name.lower() == wanted:
            return value
    return None


def _session_of(path: str) -> str | None:
    """The path's segment where a session's id is expected, cut to MAX_SESSION_ID; None if there is none."""
    if not path.startswith(_SESSIONS):
        return None
    return path[len(_SESSIONS) :].partition("/")[0][:MAX_SESSION_ID] or None
