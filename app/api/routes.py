"""The table of routes: what the server knows of a request before it is answered.

An entry says a route's methods and path, who may ask, which function answers, how large a body may be, and how the
OpenAPI document describes it (`app.api.openapi`). A module fills a `Routes` of its own, and `app.main` makes one
`Table` of all that are on. By it a request finds its route, the guard decides (`head.Guard`), and an error names the
methods that a path has.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack

from pydantic import BaseModel

from app.api.head import Head, Who
from app.api.parameters import Parameters
from app.errors import (
    AppError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    NoUpstream,
    Overloaded,
    PayloadsUnavailable,
    RequestTimeout,
    RequestTooLarge,
    Restored,
    RunMismatch,
    SessionClosed,
    SessionNotFound,
    SessionReclaimed,
    SessionUnreadable,
    StoreFull,
    StoreUnavailable,
    UnsupportedEncoding,
    UpgradeRequired,
    UpstreamInvalid,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from app.protocols.base import WireProtocol
from app.upstream.headers import Headers

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
ANYTHING: Schema = {"type": "object"}
BINARY: Schema = {"type": "string", "format": "binary"}

JSON, NDJSON, BYTES = "application/json", "application/x-ndjson", "application/octet-stream"
EVENTS = "text/event-stream"

Errors = tuple[type[AppError], ...]

BODY: Errors = (InvalidRequest, RequestTimeout, RequestTooLarge, UnsupportedEncoding, Overloaded)
READ: Errors = (StoreUnavailable,)
WRITE: Errors = (Overloaded, StoreUnavailable, StoreFull)
PAYLOADS: Errors = (PayloadsUnavailable,)
SESSION: Errors = (SessionNotFound, SessionClosed, SessionReclaimed, Restored, RunMismatch, SessionUnreadable)
ENGINE: Errors = (UpstreamInvalid, UpstreamUnreachable, NoUpstream, UpstreamTimeout)

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

CONTROL_BYTES = 1 << 20
"""Maximum bytes of a body that is not a turn's: it is parsed on the event loop at once."""

_BELOW_SESSION = "/sessions/{session_id}"
_V1 = "/v1/"
_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")

MOST_ROWS = 500
"""In a view of the page's."""


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

Endpoint = Callable[..., Awaitable[Any]]
"""Gets a `Request` and the parameters that its signature names. Returns a response, or what the reply's JSON is made
of, or None for an empty one. Raises AppError. Its docstring is the description in the document."""

OfRun = Literal["session", "query", "body", "path", "header", "any"]
"""Where a route says whose run it is about, for the token of a run (`app.api.of_run`).

    session    the session in the path, which must be the run's; outside `/sessions/` by its id alone
    query      the parameter `run`, which is set to the token's run
    body       the field `run`, likewise
    path       `{run}`, which must be the token's
    header     `x-turnlog-run`, which is set to the token's run on every route
    any        nowhere: there is nothing of any run in it
"""

ErrorParts = Callable[[AppError], tuple[int, Headers, bytes]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Route:
    """An entry. A `{name}` in `path` is one part of it, a `{name:path}` any text with slashes and line feeds.

    A route of turns has a `protocol` and no endpoint. One without a `summary` is not in the document. `largest` limits
    the body's bytes; with `optional_body` an empty one means `{}`. `example` is a valid body, `headers` are those a
    turn reads. `error_parts` makes error replies that are not spelled as the path's protocol spells them. Without
    `of_run` the route is closed to the token of a run.
    """

    methods: tuple[str, ...]
    path: str
    who: Who
    tag: str = ""
    summary: str = ""
    endpoint: Endpoint | None = None
    protocol: WireProtocol | None = None
    replies: tuple[Reply, ...] = ()
    errors: Errors = ()
    body: type[BaseModel] | None = None
    optional_body: bool = False
    example: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    largest: int = CONTROL_BYTES
    passes_engines_errors: bool = False
    error_parts: ErrorParts | None = None
    of_run: OfRun | None = None

    @cached_property
    def limit(self) -> OfRun | None:
        """`of_run`, or None where the route lacks the place that it names: what cannot be limited stays closed."""
        match self.of_run:
            case "session":
                is_there = "{session_id}" in self.path
            case "path":
                is_there = "{run}" in self.path
            case "query":
                is_there = self.endpoint is not None and "run" in self.parameters.names_in("query")
            case "body":
                is_there = self.body is not None and "run" in self.body.model_fields
            case _:
                is_there = True
        return self.of_run if is_there else None

    @cached_property
    def parameters(self) -> Parameters:
        assert self.endpoint is not None
        return Parameters(self.endpoint)

    @cached_property
    def documented_path(self) -> str:
        return _PARAMETER.sub(r"{\1}", self.path)


class Options(TypedDict, total=False):
    """What an endpoint may say of its route, beside what each must say."""

    errors: Errors
    body: type[BaseModel]
    optional_body: bool
    example: Mapping[str, Any]
    largest: int
    headers: Mapping[str, str]
    passes_engines_errors: bool
    of_run: OfRun


Answering = TypeVar("Answering", bound=Endpoint)


class Routes:
    """Routes of one module, which the document has under `tag`."""

    def __init__(self, tag: str, error_parts: ErrorParts | None = None) -> None:
        self.entries: list[Route] = []
        self._tag = tag
        self._error_parts = error_parts

    def __call__(
        self, places: str | Iterable[str], summary: str, who: Who, *replies: Reply, **options: Unpack[Options]
    ) -> Callable[[Answering], Answering]:
        """Add the function below as what answers at `places`, each written as `GET /path` or `GET, HEAD /path`."""

        def added(endpoint: Answering) -> Answering:
            for place in (places,) if isinstance(places, str) else places:
                methods, _, path = place.rpartition(" ")
                self.entries.append(
                    Route(
                        methods=tuple(methods.split(", ")),
                        path=path,
                        who=who,
                        tag=self._tag,
                        summary=summary,
                        endpoint=endpoint,
                        replies=replies,
                        error_parts=self._error_parts,
                        **options,
                    )
                )
            return endpoint

        return added

    def for_the_page(self, path: str, of_run: OfRun | None = None) -> Callable[[Answering], Answering]:
        """A view under `/ui/api`: it belongs to the page, and may change with it."""
        data = Reply("The view's data.", {JSON: ANYTHING})
        options: Options = {"errors": (InvalidRequest, NotFound, *SESSION, *READ)}
        if of_run is not None:
            options["of_run"] = of_run
        return self(f"GET /ui/api{path}", "For the page", "page", data, **options)


class Table:
    """All routes of an application. Of two that fit a path, one without parameters decides, else the first.

    A slash at the end of a path does not matter, but to turns: not every client that sends a body follows a redirect.
    Below a session `/v1` may be left out: an agent may have been given the session's address as its base URL.

    `plain` are those without parameters, by method, whether the path is below a session, and what it is there.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(spelled for route in routes for spelled in _spellings(route))
        self.plain: dict[tuple[str, bool, str], Route] = {}
        self._patterns: dict[tuple[str, bool], list[tuple[re.Pattern[str], Route]]] = {}
        for route in self.routes:
            self._add(route, "")
        for route in self.routes:
            if route.protocol is None:
                # Nothing without a token at a path that no document has.
                self._add(replace(route, who="page") if route.who in ("anyone", "browser") else route, "/")

    def _add(self, route: Route, end: str) -> None:
        in_session = route.path == _BELOW_SESSION or route.path.startswith(_BELOW_SESSION + "/")
        below = (route.path.removeprefix(_BELOW_SESSION) if in_session else route.path) + end
        pattern = _pattern(below) if "{" in below else None
        for method in route.methods:
            if pattern is None:
                self.plain.setdefault((method, in_session, below), route)
            else:
                self._patterns.setdefault((method, in_session), []).append((pattern, route))

    def find(self, head: Head) -> Route:
        """The route of a request; for an unknown path or method one that answers with the error."""
        route, head.path_values = self._fitting(head.method, head)
        if route is not None:
            return route
        others = {method: other for method in METHODS if (other := self._fitting(method, head)[0]) is not None}

        async def refuse(_: object) -> None:
            raise _unknown_route(head, others)

        # A session's token is told that there is no WebSocket, or no HEAD of what it may GET, not that it may not ask.
        is_of_session = (
            head.path_session is not None
            or _asks_for_websocket(head, others)
            or (head.method == "HEAD" and "GET" in others and others["GET"].who == "session")
        )
        who: Who = "session" if is_of_session else "page"
        if head.path_session is not None:
            return Route(methods=(), path=_BELOW_SESSION, who=who, endpoint=refuse, of_run="session")
        return Route(methods=(), path="", who=who, endpoint=refuse, of_run="any")

    def _fitting(self, method: str, head: Head) -> tuple[Route | None, Mapping[str, str]]:
        """The route with this method at the request's path, and the values of the parameters in it."""
        place = method, head.path_session is not None
        plain = self.plain.get((*place, head.route))
        if plain is not None:
            return plain, {}
        for pattern, route in self._patterns.get(place, ()):
            if matched := pattern.fullmatch(head.route):
                return route, matched.groupdict()
        return None, {}


def _spellings(route: Route) -> Iterator[Route]:
    yield route
    if route.path.startswith(_BELOW_SESSION + _V1):
        path = _BELOW_SESSION + "/" + route.path.removeprefix(_BELOW_SESSION + _V1)
        yield replace(route, path=path, summary=f"{route.summary}, without /v1")


def _asks_for_websocket(head: Head, others: Mapping[str, Route]) -> bool:
    """At a turn's path? `others` are the routes of the path, by method."""
    is_turns = any(route.protocol is not None for route in others.values())
    return is_turns and any(b"websocket" in value.lower() for value in head.headers.get(b"upgrade", ()))


def _unknown_route(head: Head, others: Mapping[str, Route]) -> AppError:
    """The error for a path or method that no route has; `others` are the routes of this path, by method."""
    path: str = head.scope["path"]
    if _asks_for_websocket(head, others):
        # Codex tries a WebSocket first. At a 426 it goes on with POST at once, at anything else after seven tries.
        return UpgradeRequired(f"{path} does not support WebSockets; use POST")
    if others:
        return MethodNotAllowed.of(head.method, path, list(others))
    message = f"there is no route {head.method} {path}"
    if "/v1/v1/" in path:
        message += "; the path has /v1 twice: an Anthropic base URL must not end in /v1"
    elif path.endswith(("/completions", "/models", "/responses")):
        message += "; an OpenAI base URL must end in /v1"
    return NotFound(message)


def _pattern(path: str) -> re.Pattern[str]:
    """What a path with parameters matches."""
    text, *rest = _PARAMETER.split(path)
    made = re.escape(text)
    for name, is_path, text in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        made += (f"(?P<{name}>(?s:.*))" if is_path else f"(?P<{name}>[^/]+)") + re.escape(text)
    return re.compile(made)
