"""What the head of a request says, read once before a route is chosen; and the headers that every reply gets."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from starlette.types import Message, Scope, Send

from app.api.limits import CONNECTION, PEER
from app.logs import LogContext
from app.upstream.headers import Headers

if TYPE_CHECKING:
    from app.api.connection import BoundedProtocol

REQUEST_ID = "x-request-id"
ANTHROPICS = "request-id"
"""The header that Anthropic's SDKs read; the OpenAI SDKs show `x-request-id` as `_request_id`."""

HARDENING = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)
"""Keep a browser from running or framing the content of a reply: it holds text of agents and engines, and a browser
that opens one treats it as part of the page's origin. The page's files set their own."""

_VALID_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_OF_PROXIES = (b"forwarded", b"x-real-ip")
_SESSIONS = "/sessions/"
_MESSAGES = "/v1/messages"

RawHeaders = Sequence[tuple[bytes, bytes]]


def request_ids() -> Iterator[str]:
    """Ids that no other process gives. They are not secret; a random id each would cost ten times as much."""
    process = secrets.token_hex(5)
    return (f"{process}-{number:x}" for number in itertools.count(1))


class Head(LogContext):
    """A request's head. Log lines name its id and its session.

    `path` is the one that routers match: decoded and without the root path. If it begins with `/sessions/{id}`,
    `path_session` is the id and `route` what follows; else it is None and `route` is the path. `headers` are the values
    of each header by its name in lower case. `is_forwarded`: a proxy's header is among them. `peer` is the address of
    the connection's other end, `connection` the connection, where uvicorn serves it. `own_headers` are those that the
    reply gets: the id, which is the client's own `x-request-id` if that is valid.
    """

    __slots__ = (
        *("connection", "header_bytes", "headers", "is_forwarded", "method", "own_headers"),
        *("path", "path_session", "peer", "route", "scope"),
    )

    def __init__(self, scope: Scope, ids: Iterator[str]) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        if root and path.startswith(root):  # as in Starlette
            rest = path[len(root) :]
            path = rest if not rest or rest[0] == "/" else path
        self.path = path
        self.path_session: str | None = None
        self.route = path
        if path.startswith(_SESSIONS):
            name, slash, rest = path[len(_SESSIONS) :].partition("/")
            if name:
                self.path_session, self.route = name, slash + rest
        headers: dict[bytes, list[bytes]] = {}
        size = 0
        is_forwarded = False
        for name, value in scope["headers"]:
            size += len(name) + len(value)
            if name in headers:
                headers[name].append(value)
            else:
                headers[name] = [value]
                if name in _OF_PROXIES or name.startswith(b"x-forwarded-"):
                    is_forwarded = True
        self.headers = headers
        self.header_bytes = size
        self.is_forwarded = is_forwarded
        given = headers.get(b"x-request-id")
        self.request_id = given[0].decode() if given and _VALID_ID.fullmatch(given[0]) else next(ids)
        self.own_headers: Headers = [(REQUEST_ID, self.request_id)]
        if _MESSAGES in path:
            self.own_headers.append((ANTHROPICS, self.request_id))
        self.session_id = self.path_session
        self.has_ended = False
        state = scope.get("state") or {}
        self.connection: BoundedProtocol | None = state.get(CONNECTION)
        peer = state.get(PEER) or scope["client"]
        self.peer: str | None = None if peer is None else str(peer[0])

    def naming(self, send: Send) -> Send:
        """`send` that adds `own_headers`, but for those that the reply passes on from an engine."""
        return _adding(send, self.own_headers, ())

    def hardening(self, send: Send) -> Send:
        """`send` that adds `own_headers` and HARDENING, but for those that the reply has."""
        return _adding(send, self.own_headers, HARDENING)


def _adding(send: Send, own: Headers, others: RawHeaders) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            given: RawHeaders = message["headers"]
            names = {name.lower() for name, _ in given}
            added = [*((name.encode(), value.encode()) for name, value in own), *others]
            message["headers"] = [*given, *(header for header in added if header[0] not in names)]
        await send(message)

    return sending
