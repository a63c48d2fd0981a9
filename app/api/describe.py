"""Describes routes for the OpenAPI document, which `app.api.openapi` builds.

FastAPI cannot derive it: bodies are read by hand, 422 is 400 here, and replies are streams and structs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel

from app.errors import (
    AppError,
    InvalidRequest,
    NoUpstream,
    Overloaded,
    PayloadsUnavailable,
    RequestTimeout,
    RequestTooLarge,
    Restored,
    SessionClosed,
    SessionNotFound,
    SessionReclaimed,
    SessionUnreadable,
    StoreFull,
    StoreUnavailable,
    UnsupportedEncoding,
    UpstreamInvalid,
    UpstreamTimeout,
    UpstreamUnreachable,
)

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
ANYTHING: Schema = {"type": "object"}
BINARY: Schema = {"type": "string", "format": "binary"}

JSON, NDJSON, BYTES = "application/json", "application/x-ndjson", "application/octet-stream"
EVENTS = "text/event-stream"


Errors = tuple[type[AppError], ...]
Who = Literal["anyone", "session", "admin", "page"]
"""Whose token a request needs if an admin token is set; `page`: the admin token or the page's cookie."""

BODY: Errors = (InvalidRequest, RequestTimeout, RequestTooLarge, UnsupportedEncoding, Overloaded)
READ: Errors = (StoreUnavailable,)
WRITE: Errors = (Overloaded, StoreUnavailable, StoreFull)
PAYLOADS: Errors = (PayloadsUnavailable,)
SESSION: Errors = (SessionNotFound, SessionClosed, SessionReclaimed, Restored, SessionUnreadable)
ENGINE: Errors = (UpstreamInvalid, UpstreamUnreachable, NoUpstream, UpstreamTimeout)


class Reply(NamedTuple):
    """A successful reply. `content` maps media types to schemas or to types: of the whole, for NDJSON of a line."""

    description: str
    content: Mapping[str, Any]
    headers: tuple[str, ...] = ()
    status: int = 200


def json_reply(kind: Any, description: str = "Done.", status: int = 200) -> Reply:
    """`kind` is a type of `turnlog.replies` or of `turnlog.rows`, or a struct that the reply is encoded from."""
    return Reply(description, {JSON: kind}, status=status)


NO_CONTENT = Reply("Done.", {}, status=204)


class RouteDescription(NamedTuple):
    """A route. With `optional_body` an empty body means `{}`. `example` is a valid body."""

    summary: str
    who: Who
    replies: tuple[Reply, ...]
    errors: Errors = ()
    body: type[BaseModel] | None = None
    optional_body: bool = False
    example: Mapping[str, Any] | None = None
    passes_engines_errors: bool = False


Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

_OPERATION = "operation"


def describe(
    summary: str,
    who: Who,
    *replies: Reply,
    errors: Errors = (),
    body: type[BaseModel] | None = None,
    optional_body: bool = False,
    example: Mapping[str, Any] | None = None,
    passes_engines_errors: bool = False,
) -> Callable[[Endpoint], Endpoint]:
    """Attach a RouteDescription to an endpoint; the endpoint's docstring is the description."""
    operation = RouteDescription(summary, who, replies, errors, body, optional_body, example, passes_engines_errors)

    def described(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _OPERATION, operation)
        return endpoint

    return described


def operation_of(endpoint: Callable[..., Any]) -> RouteDescription:
    operation: RouteDescription = getattr(endpoint, _OPERATION)
    return operation
