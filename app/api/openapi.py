"""Makes the OpenAPI document, which `/docs` shows, from the routes, their `describe` and the protocols' own routes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from app.api.describe import (
    ANYTHING,
    BODY,
    ENGINE,
    EVENTS,
    JSON,
    NDJSON,
    PAYLOADS,
    SESSION,
    TEXT,
    WRITE,
    Reply,
    RouteDescription,
    Schema,
    Who,
    operation_of,
)
from app.api.head import COOKIE
from app.api.header_sessions import AGENT, FINAL, HARNESSES, PARENT
from app.api.replies import LEFT_OUT, ROLLED_BACK
from app.domain.patterns import ID
from app.errors import (
    AppError,
    ClaimLost,
    EnginesFailed,
    Forbidden,
    GenerationAborted,
    HeadersTooLarge,
    HistoryMismatch,
    IdempotencyMismatch,
    OverBudget,
    PreviousResponseNotFound,
    RollbackTooDeep,
    SessionBusy,
    SessionOpenFailed,
    TargetTooLong,
    TokenPrefixMismatch,
    TooManySessions,
    TooManyTurns,
    Unauthorized,
    Unsupported,
    WorkerCrash,
)
from app.protocols.registry import ROUTES
from turnlog.replies import Error, ToldEngines

COMPONENTS, RESPONSES = "#/components/schemas/", "#/components/responses/"

ANYONE: tuple[type[AppError], ...] = (TargetTooLong, HeadersTooLarge, AppError)
GUARDED: tuple[type[AppError], ...] = (Unauthorized, Forbidden, *ANYONE)
TURN: tuple[type[AppError], ...] = (
    *BODY,
    Unsupported,
    RollbackTooDeep,
    HistoryMismatch,
    PreviousResponseNotFound,
    *SESSION,
    TooManySessions,
    TooManyTurns,
    OverBudget,
    SessionBusy,
    ClaimLost,
    IdempotencyMismatch,
    *ENGINE,
    WorkerCrash,
    SessionOpenFailed,
    GenerationAborted,
    *WRITE,
    *PAYLOADS,
    TokenPrefixMismatch,
    *GUARDED,
)

_ADMIN, _SESSION, _COOKIE = "adminToken", "sessionToken", "pageCookie"
SECURITY: Mapping[Who, list[dict[str, list[str]]]] = {
    "anyone": [],
    "admin": [{_ADMIN: []}],
    "page": [{_ADMIN: []}, {_COOKIE: []}],
    "session": [{_ADMIN: []}, {_SESSION: []}],
}
_BEARER = {"type": "http", "scheme": "bearer"}
SCHEMES: Mapping[str, Schema] = {
    _ADMIN: {**_BEARER, "description": "One of `TURNLOG_ADMIN_TOKEN`; without any, none is needed."},
    _SESSION: {
        **_BEARER,
        "description": "`token` of the reply that created the session: for it alone. `x-api-key` may hold it, too.",
    },
    _COOKIE: {"type": "apiKey", "in": "cookie", "name": COOKIE.decode(), "description": "`POST /ui/sign-in` gives it."},
}

REPLY_HEADERS: Mapping[str, str] = {
    "x-turnlog-turn": "The number of the turn that this reply is.",
    "x-turnlog-replayed": "`true` where nothing was generated: the reply came from the log or from the turn in flight.",
    ROLLED_BACK: "How many turns this one superseded when it committed; absent where it is none.",
    LEFT_OUT: "What of the request the engine was not sent, as `code:place`; absent where that is nothing.",
    "x-turnlog-session-id": "The session that was made for a request that named none (`TURNLOG_WITHOUT_SESSION`).",
    "x-turnlog-cursor": "Repeats this export.",
    "x-turnlog-next-cursor": "Goes on behind the whole export.",
    "x-turnlog-empty": "`true` where there is no row.",
    "x-turnlog-dtype": "`uint8`, `uint16`, `int16` or `int32`.",
    "x-turnlog-shape": "A JSON list, rows first.",
    "x-turnlog-row-start": "Which token the first row belongs to.",
    "x-miles-session-generation": "What a `DELETE` names, so that it closes nothing that has come since.",
    "x-turnlog-reply-bytes": "The size of the whole reply.",
    "content-disposition": "A file's name.",
    "x-should-retry": "`false` where the same request can only fail again, `true` where it should be sent again.",
    "retry-after": "Seconds after which to try again.",
    "www-authenticate": "`Bearer`.",
}

TURN_REPLY_HEADERS = ("x-turnlog-turn", "x-turnlog-replayed", ROLLED_BACK, LEFT_OUT)
TURN_HEADERS: Mapping[str, str] = {
    "idempotency-key": "With the key of a committed turn: that turn's reply again; of the turn in flight: joins it.",
    "x-stainless-retry-count": "Sent by the OpenAI SDKs: 1 or more marks a retry of the same body.",
    "x-request-id": "The client's own name for the request; the reply repeats it.",
}
SESSION_HEADERS: Mapping[str, str] = {
    **{harness.session: "Names the session, which is created on first use." for harness in HARNESSES},
    AGENT: "An agent of the session: a branch of it, or a session of its own.",
    PARENT: "The session whose agent made this one's.",
    FINAL: "`true`: close the session after this turn.",
}
"""Of the routes that have no session in their path: the first that is present names it."""


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI 3.1 document of all routes of `app`."""
    builder = _Builder()
    paths = builder.turns()
    known = get_openapi(title=app.title, version=app.version, routes=app.routes)["paths"]
    for route in routes_of(app.routes):
        for method, fields in known.get(route.path_format, {}).items():
            if route.include_in_schema and method.upper() in (route.methods or ()):
                operation = builder.operation(operation_of(route.endpoint), fields)
                paths.setdefault(route.path_format, {})[method] = operation
    for direct in app.state.direct_routes:
        operation = builder.operation(operation_of(direct.endpoint), direct.fields)
        paths.setdefault(direct.path, {})[direct.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Turnlog",
            "version": app.version,
            "description": "A durable session server between agent harnesses and inference engines.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": {path: paths[path] for path in sorted(paths)},
        "components": {**builder.components(), "securitySchemes": dict(SCHEMES)},
    }


def routes_of(routes: Iterable[BaseRoute]) -> Iterator[APIRoute]:
    """All routes, also those of included routers, which newer versions of FastAPI keep as one route."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif (router := getattr(route, "original_router", None)) is not None:
            yield from routes_of(router.routes)


class _Builder:
    """Makes operations, and collects the components that they refer to."""

    def __init__(self) -> None:
        self._kinds: list[Any] = [Error, ToldEngines]
        self._schemas: dict[str, Schema] = {}
        self._responses: dict[str, Schema] = {}

    def components(self) -> dict[str, Any]:
        _, schemas = msgspec.json.schema_components(self._kinds, ref_template=COMPONENTS + "{name}")
        return {
            "schemas": dict(sorted({**schemas, **self._schemas}.items())),
            "responses": dict(sorted(self._responses.items())),
        }

    def operation(self, known: RouteDescription, fields: Schema) -> Schema:
        """The operation of a route of FastAPI's, whose `fields` are FastAPI's own description."""
        made: Schema = {
            "summary": known.summary,
            "description": _paragraphs(fields.get("description", "")),
            "tags": fields["tags"],
            "parameters": [_parameter(parameter) for parameter in fields.get("parameters", ())],
            "responses": {
                **{str(reply.status): self._reply(reply) for reply in known.replies},
                **self._errors(
                    [*known.errors, *(ANYONE if known.who == "anyone" else GUARDED)], known.passes_engines_errors
                ),
            },
            "security": SECURITY[known.who],
        }
        if known.body is not None:
            schema = known.body.model_json_schema(ref_template=COMPONENTS + "{model}")
            self._schemas |= {**schema.pop("$defs", {}), known.body.__name__: schema}
            body = {"schema": {"$ref": COMPONENTS + known.body.__name__}}
            if known.example is not None:
                body["example"] = dict(known.example)
            made["requestBody"] = {"required": not known.optional_body, "content": {JSON: body}}
        return {name: value for name, value in made.items() if value or name == "security"}

    def turns(self) -> dict[str, Schema]:
        """The routes that generate: plain ASGI endpoints, with the session in the path or in a header."""
        session_id = {"name": "session_id", "in": "path", "required": True, "description": "A session's id."}
        in_path = [{**session_id, "schema": {**TEXT, "pattern": ID}}]
        in_header = [_header_parameter(name, text) for name, text in SESSION_HEADERS.items()]
        paths: dict[str, Schema] = {}
        for protocol in ROUTES.values():
            name = str(protocol.schema["title"])
            self._schemas[name] = dict(protocol.schema)
            for prefix, summary, parameters, told in (
                ("/sessions/{session_id}", "", in_path, ()),
                ("", ", of the session that a header, its token or the body names", in_header, HARNESSES[0][:1]),
            ):
                body = {"schema": {"$ref": COMPONENTS + name}, "example": protocol.example}
                reply = Reply(
                    "The turn is on disk, and this is the engine's reply, as the protocol spells it.",
                    {JSON: ANYTHING, EVENTS: {}},
                    (*TURN_REPLY_HEADERS, *told),
                )
                operation = {
                    "summary": f"One turn, {protocol.route.removeprefix('/v1/')}{summary}",
                    "tags": ["Turns"],
                    "parameters": [*parameters, *(_header_parameter(*header) for header in TURN_HEADERS.items())],
                    "requestBody": {"required": True, "content": {JSON: body}},
                    "responses": {"200": self._reply(reply), **self._errors(TURN, engines_too=True)},
                    "security": SECURITY["session"],
                }
                paths[prefix + protocol.route] = {method.lower(): operation for method in protocol.methods}
        return paths

    def _reply(self, reply: Reply) -> Schema:
        made: Schema = {"description": reply.description}
        if reply.headers:
            made["headers"] = {name: _header(name) for name in reply.headers}
        if reply.content:
            made["content"] = {media: {"schema": self._schema(media, kind)} for media, kind in reply.content.items()}
        return made

    def _schema(self, media_type: str, kind: Any) -> Schema:
        if isinstance(kind, dict):
            return kind
        self._kinds.append(kind)
        [schema], _ = msgspec.json.schema_components([kind], ref_template=COMPONENTS + "{name}")
        if media_type != NDJSON:
            return schema
        return {**TEXT, "description": "One JSON object a line.", "x-line": schema}

    def _errors(self, errors: Sequence[type[AppError]], engines_too: bool) -> dict[str, Schema]:
        """The error replies by status; each combination of codes is one component.

        `engines_too`: an engine's own error, which passes as it is, may have the same status, or any other.
        """
        by_status: dict[int, dict[str, type[AppError]]] = {}
        for error in errors:
            by_status.setdefault(error.status, {})[error.code] = error
        replies: dict[str, Schema] = {}
        for status, by_code in sorted(by_status.items()):
            name = "_or_".join([*sorted(by_code), *(["engine_error"] if engines_too else [])])
            self._responses[name] = _error_reply(by_code, engines_too)
            replies[str(status)] = {"$ref": RESPONSES + name}
        if engines_too:
            content: Schema = {"*/*": {"schema": {}}}
            self._responses["engine_error"] = {"description": "The engine's own error, unchanged.", "content": content}
            replies["default"] = {"$ref": RESPONSES + "engine_error"}
        return replies


def _error_reply(by_code: Mapping[str, type[AppError]], engines_too: bool) -> Schema:
    codes = {"properties": {"error": {"properties": {"code": {"enum": sorted(by_code)}}}}}
    parts: list[Schema] = [{"$ref": COMPONENTS + "Error"}, codes]
    if EnginesFailed.code in by_code:
        parts.append({"$ref": COMPONENTS + "ToldEngines"})
    schema: Schema = {"allOf": parts}
    headers = {name: _header(name) for kind in by_code.values() for name in kind("").headers() if name in REPLY_HEADERS}
    return {
        "description": "; ".join(f"`{code}`: {by_code[code].meaning}" for code in sorted(by_code)),
        **({"headers": headers} if headers else {}),
        "content": {JSON: {"schema": {"anyOf": [schema, ANYTHING]} if engines_too else schema}},
    }


def _header(name: str) -> Schema:
    return {"description": REPLY_HEADERS[name], "schema": TEXT}


def _header_parameter(name: str, description: str) -> Schema:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": TEXT}


def _parameter(fields: Schema) -> Schema:
    """A query parameter cannot be null: an optional one is left out."""
    from app.export.formats import FORMATS, SHAPES  # an export's modules are imported at its first use

    schema = dict(fields["schema"])
    choices = [choice for choice in schema.pop("anyOf", ()) if choice != {"type": "null"}]
    schema |= choices[0] if len(choices) == 1 else {"anyOf": choices} if choices else {}
    for name in ("title", "description"):
        schema.pop(name, None)
    if fields["name"] in ("format", "shape"):
        schema["enum"] = list(FORMATS if fields["name"] == "format" else SHAPES)
    return {**fields, "schema": schema}


def _paragraphs(text: str) -> str:
    """A docstring as a description: without line ends, and without its sentence about the Python errors raised."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "\n\n".join(paragraph.partition(" Raises ")[0] for paragraph in paragraphs)
