"""Turns exceptions of routes into error replies, in the form that the path's clients read."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from app.api.head import route_path
from app.api.replies import INTERNAL, error_parts
from app.api.state import services
from app.errors import AppError, InvalidRequest
from app.logs import request_id
from app.metrics import METHOD_NOT_ALLOWED, NOT_FOUND, UPGRADE_REQUIRED
from app.protocols.base import WireProtocol
from app.protocols.errors import ErrorFields, openai_error
from app.protocols.registry import PROTOCOLS, ROUTES, protocol_at
from app.upstream.headers import Headers

if TYPE_CHECKING:
    from app.api.direct import DirectRoute
    from app.services import Services

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

_TURN = re.compile(rf"(/sessions/[^/]+)?({'|'.join(map(re.escape, ROUTES))})")
"""Paths of the routes that are not FastAPI's (`app.api.turns`)."""


def handle_faults(app: FastAPI) -> None:
    app.add_exception_handler(AppError, _app_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _fault)


def speaks_messages(request: Request) -> bool:
    """Does the client of a path that several protocols have speak Anthropic's? Its SDKs send this header always."""
    return "anthropic-version" in request.headers


def _protocol_of(request: Request) -> WireProtocol | None:
    """The path's protocol, else the one that the client says to speak."""
    return protocol_at(route_path(request.scope)) or (PROTOCOLS["messages"] if speaks_messages(request) else None)


async def error_reply(
    app: Services, protocol: WireProtocol | None, error: AppError, request_id: str | None
) -> tuple[int, Headers, bytes]:
    """Count an error of a request that is no turn. Returns the status, headers and body of its reply."""
    try:
        error = await app.explained(error)
    except AppError as failed:
        error = failed
    app.metrics.request_failed(error.code)
    return error_parts(error, protocol, request_id)


async def _app_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AppError)
    status, headers, body = await error_reply(services(request), _protocol_of(request), error, request_id())
    return Response(body, status, dict(headers))


async def _fault(request: Request, error: Exception) -> Response:
    """An unexpected exception, which the server logs."""
    return await _app_error(request, AppError(INTERNAL))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    given = f"={first['input']!s:.64}" if isinstance(first["input"], str) else ""
    wanted = first["msg"].removeprefix("Value error, ")
    return await _app_error(request, InvalidRequest(f"{place or 'the body'}{given}: {wanted}"))


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's errors: an unknown path or method.

    The router lists only the methods of the first route with the path; `_allowed` finds them all.
    """
    assert isinstance(error, HTTPException)
    path = request.url.path
    allowed = _allowed(request) if error.status_code in (404, 405) else []
    if (
        allowed
        and "websocket" in request.headers.get("upgrade", "").lower()
        and _TURN.fullmatch(route_path(request.scope))
    ):
        # Codex tries a WebSocket first. At a 426 it goes on with POST at once, at anything else after seven tries.
        message = f"there are no WebSockets on {path}; POST is supported"
        return _refusal(request, 426, UPGRADE_REQUIRED, message, {"upgrade": "HTTP/1.1", "connection": "upgrade"})
    if allowed:
        message = f"{request.method} is not supported on {path}; supported: {', '.join(allowed)}"
        return _refusal(request, 405, METHOD_NOT_ALLOWED, message, {"allow": ", ".join(allowed)})
    message = f"there is no route {request.method} {path}"
    if "/v1/v1/" in path:
        message += "; /v1 is there twice: an Anthropic base URL does not end in it"
    elif path.endswith(("/completions", "/models", "/responses")):
        message += "; an OpenAI base URL ends in /v1"
    return _refusal(request, 404, NOT_FOUND, message, {})


def _refusal(request: Request, status: int, code: str, message: str, headers: dict[str, str]) -> Response:
    services(request).metrics.request_failed(code)
    protocol = _protocol_of(request)
    render = openai_error if protocol is None else protocol.error
    body = render(ErrorFields(status, message, "invalid_request_error", code, request_id=request_id()))
    return Response(body, status, headers, "application/json")


def _allowed(request: Request) -> list[str]:
    """The methods of all routes with this path."""
    app: FastAPI = request.app
    if turn := _TURN.fullmatch(route_path(request.scope)):
        return [*ROUTES[turn[2]].methods]
    direct: Collection[DirectRoute] = app.state.direct_routes
    path = route_path(request.scope)
    allowed = {method for route in direct if route.matches(path) for method in route.methods}
    return [
        method
        for method in METHODS
        if method in allowed
        or any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in app.router.routes)
    ]
