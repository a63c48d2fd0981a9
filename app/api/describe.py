"""What FastAPI cannot know of a route, said at the route: `app.api.openapi` makes the document of it.

Bodies are read by hand, 422 is 400 here, and replies are streams and structs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel

from app.errors import (
    AppError,
    InvalidRequest,
    NoUpstream,
    Overloaded,
    RequestTimeout,
    RequestTooLarge,
    SessionClosed,
    SessionNotFound,
    SessionUnreadable,
    StoreFull,
    StoreUnavailable,
    UpstreamInvalid,
    UpstreamTimeout,
    UpstreamUnreachable,
)

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
BOOLEAN: Schema = {"type": "boolean"}
ANYTHING: Schema = {"type": "object"}
BINARY: Schema = {"type": "string", "format": "binary"}

JSON, NDJSON, BYTES = "application/json", "application/x-ndjson", "application/octet-stream"
EVENTS = "text/event-stream"

COMPONENTS = "#/components/schemas/"


def ref(name: str) -> Schema:
    return {"$ref": COMPONENTS + name}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def listed(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def record(description: str, optional: Iterable[str] = (), **fields: Schema) -> Schema:
    """An object; fields that are not optional are always there."""
    needed = [name for name in fields if name not in set(optional)]
    return {"type": "object", "description": description, "properties": fields, "required": needed}


def lines(line: str) -> Schema:
    """A JSON object a line."""
    return {"type": "string", "description": f"One JSON object `{line}` a line.", "x-line": ref(line)}


Errors = tuple[type[AppError], ...]
Who = Literal["anyone", "session", "admin", "page"]
"""Whose token is needed, where tokens are on; `page`: the admin's, or the cookie that the page has for it."""

BODY: Errors = (InvalidRequest, RequestTimeout, RequestTooLarge, Overloaded)
READ: Errors = (StoreUnavailable,)
WRITE: Errors = (Overloaded, StoreUnavailable, StoreFull)
SESSION: Errors = (SessionNotFound, SessionClosed, SessionUnreadable)
ENGINE: Errors = (UpstreamInvalid, UpstreamUnreachable, NoUpstream, UpstreamTimeout)


class Reply(NamedTuple):
    """A success, by its media types."""

    description: str
    content: Mapping[str, Schema]
    headers: tuple[str, ...] = ()
    status: int = 200


def json_reply(component: str, description: str = "Done.", status: int = 200) -> Reply:
    return Reply(description, {JSON: ref(component)}, status=status)


NOTHING = Reply("Done.", {}, status=204)


class RouteDescription(NamedTuple):
    """`optional_body`: none at all is the same as `{}`. `example` is a body that works."""

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
    """Say this of an endpoint; its docstring is the route's description."""
    operation = RouteDescription(summary, who, replies, errors, body, optional_body, example, passes_engines_errors)

    def described(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _OPERATION, operation)
        return endpoint

    return described


def operation_of(endpoint: Callable[..., Any]) -> RouteDescription:
    found: RouteDescription = getattr(endpoint, _OPERATION)
    return found
