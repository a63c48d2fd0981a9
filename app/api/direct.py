"""Answers routes without FastAPI's routing and parameters, which cost more than what they lead to:
those that every session needs beside its turns, and those that are asked every few seconds. The
document describes them with the others."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec
from pydantic import TypeAdapter, ValidationError
from starlette.types import Receive, Send

from app.api.describe import Schema
from app.api.error_handlers import error_reply
from app.api.head import Head
from app.api.limits import arrived_body
from app.api.replies import INTERNAL
from app.api.state import CONTROL_BYTES
from app.domain.patterns import ID
from app.errors import AppError, InvalidRequest, SessionNotFound
from app.protocols.registry import protocol_at

if TYPE_CHECKING:
    from app.services import Services

log = logging.getLogger("turnlog.requests")

NO_CONTENT = 204

_ID = re.compile(ID)
_BOOLEAN = TypeAdapter(bool)

Endpoint = Callable[["Services", Head, Receive], Awaitable[tuple[int, Any]]]
"""Returns the status and what the reply's JSON is made of, or None for an empty reply. Raises AppError."""


class DirectRoute(NamedTuple):
    """A route, below `/sessions/{session_id}` if it `has_session`. The document has it under `tag`;
    `parameters` are those of its query and its headers."""

    method: str
    has_session: bool
    route: str
    endpoint: Endpoint
    tag: str
    parameters: tuple[Schema, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)

    @property
    def path(self) -> str:
        """As the document has it."""
        return ("/sessions/{session_id}" if self.has_session else "") + self.route

    def matches(self, path: str) -> bool:
        prefix = "/sessions/[^/]+" if self.has_session else ""
        return re.fullmatch(f"{prefix}{self.route}/?", path) is not None

    @property
    def fields(self) -> Schema:
        """As FastAPI describes its routes."""
        text = {"type": "string", "pattern": ID}
        session_id = {"name": "session_id", "in": "path", "required": True, "schema": text}
        own = [{**session_id, "description": "A session's id."}] if self.has_session else []
        parameters = [*own, *self.parameters]
        description = inspect.getdoc(self.endpoint)
        return {"description": description, "tags": [self.tag], "parameters": parameters}


def flag(head: Head, name: str) -> bool:
    """A boolean parameter of the query, false by default. Raises InvalidRequest."""
    query: bytes = head.scope["query_string"]
    if not query:
        return False
    given = [value for key, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True) if key == name]
    if not given:
        return False
    try:
        return _BOOLEAN.validate_python(given[-1])
    except ValidationError as error:
        raise InvalidRequest(f"{name}={given[-1]:.64}: {error.errors()[0]['msg']}") from error


def by_head(routes: Iterable[DirectRoute]) -> dict[tuple[str, bool, str], Endpoint]:
    """The endpoints by what a request's head says: its method, has its path a session, and its route.

    A slash at the end does not matter: a redirect, which other routes answer with, is not followed
    by every client that sends a body.
    """
    return {
        (method, route.has_session, route.route + slash): route.endpoint
        for route in routes
        for method in route.methods
        for slash in ("", "/")
    }


async def serve_direct(app: Services, endpoint: Endpoint, head: Head, receive: Receive, send: Send) -> None:
    """Answer a request, also after an unexpected exception."""
    headers = []
    body = b""
    try:
        if head.path_session is not None and not _ID.fullmatch(head.path_session):
            raise SessionNotFound("the session id is invalid")
        status, content = await endpoint(app, head, receive)
        if content is not None:
            headers, body = [("content-type", "application/json")], msgspec.json.encode(content)
    except AppError as error:
        status, headers, body = await error_reply(app, protocol_at(head.path), error, head.request_id)
    except Exception:
        log.exception("an unexpected fault in %s %s", head.method, head.route)
        status, headers, body = await error_reply(app, protocol_at(head.path), AppError(INTERNAL), head.request_id)
    if status != NO_CONTENT:
        headers.append(("content-length", str(len(body))))
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    send = head.hardening(send)
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def small_body(app: Services, head: Head, receive: Receive) -> bytes:
    """The request's body; empty if the client disconnects. Raises as `arrived_body`."""
    limit = min(CONTROL_BYTES, app.settings.max_request_bytes)
    with app.inflight.reserve(peer=head.peer) as reservation:
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.scope["headers"]]
        return await arrived_body(head, receive, headers, limit, reservation) or b""
