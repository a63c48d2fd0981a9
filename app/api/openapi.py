"""Makes the OpenAPI document, which `/docs` shows, from the table of routes and the signatures of its endpoints."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from app.api.head import COOKIE, RUN, Who
from app.api.parameters import Parameters, SessionId
from app.api.replies import LEFT_OUT, ROLLED_BACK
from app.api.routes import ANYTHING, JSON, NDJSON, TEXT, Errors, Reply, Route, Schema, Table
from app.errors import AppError, EnginesFailed, Forbidden, HeadersTooLarge, TargetTooLong, Unauthorized
from turnlog.replies import Error, ToldEngines

COMPONENTS, RESPONSES = "#/components/schemas/", "#/components/responses/"

ANYONE: Errors = (TargetTooLong, HeadersTooLarge, AppError)
GUARDED: Errors = (Unauthorized, Forbidden, *ANYONE)

_ADMIN, _SESSION, _RUN, _COOKIE = "adminToken", "sessionToken", "runToken", "pageCookie"
SECURITY: Mapping[Who, list[dict[str, list[str]]]] = {
    "anyone": [],
    "browser": [],
    "admin": [{_ADMIN: []}],
    "page": [{_ADMIN: []}, {_COOKIE: []}],
    "session": [{_ADMIN: []}, {_SESSION: []}],
}
_BEARER = {"type": "http", "scheme": "bearer"}
SCHEMES: Mapping[str, Schema] = {
    _ADMIN: {**_BEARER, "description": "One of the tokens in `TURNLOG_ADMIN_TOKEN`; if none is set, none is needed."},
    _SESSION: {
        **_BEARER,
        "description": "`token` of the reply that created the session; valid for that session only; also sent as "
        "`x-api-key`.",
    },
    _RUN: {**_BEARER, "description": "`POST /runs/{run}/token` gives it; valid for that run only."},
    _COOKIE: {"type": "apiKey", "in": "cookie", "name": COOKIE.decode(), "description": "`POST /ui/sign-in` gives it."},
}

REPLY_HEADERS: Mapping[str, str] = {
    "x-turnlog-turn": "The number of the reply's turn.",
    "x-turnlog-replayed": "`true` if nothing was generated: the reply is from the log or the turn in flight.",
    ROLLED_BACK: "How many turns this one superseded when it committed; absent if none.",
    LEFT_OUT: "The parts of the request that the engine was not sent, as `code:place`; absent if none.",
    "x-turnlog-session-id": "The session created for a request that named none (`TURNLOG_WITHOUT_SESSION`).",
    "x-turnlog-cursor": "The cursor that repeats this export.",
    "x-turnlog-next-cursor": "The cursor that continues after the whole export.",
    "x-turnlog-empty": "`true` if there are no rows.",
    "x-turnlog-dtype": "`uint8`, `uint16`, `int16` or `int32`.",
    "x-turnlog-shape": "A JSON list, rows first.",
    "x-turnlog-row-start": "Which token the first row belongs to.",
    "x-miles-session-generation": "The revision for a `DELETE`, which then fails if the session has changed since.",
    "x-turnlog-reply-bytes": "The size of the whole reply.",
    "content-disposition": "A file's name.",
    "x-should-retry": "`false` if the same request can only fail again, `true` if it should be retried.",
    "retry-after": "Seconds to wait before a retry.",
    "www-authenticate": "`Bearer`.",
}


def document(table: Table, release: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of all routes of `table`."""
    builder = _Builder()
    routes = [route for route in table.routes if route.summary]
    paths: dict[str, Schema] = {}
    for route in routes:
        for method in route.methods:
            if method != "HEAD":
                path, method = route.documented_path, method.lower()
                paths.setdefault(path, {})[method] = builder.operation(route, method)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Turnlog",
            "version": release,
            "description": "A durable session server between agent harnesses and inference engines.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": {path: paths[path] for path in sorted(paths)},
        "components": {**builder.components(), "securitySchemes": dict(SCHEMES)},
    }


class _Builder:
    """Makes operations, and collects the components that they refer to."""

    def __init__(self) -> None:
        self._kinds: list[Any] = [Error, ToldEngines]
        self._schemas: dict[str, Schema] = {}
        self._responses: dict[str, Schema] = {}

    def components(self) -> dict[str, Any]:
        _, schemas = msgspec.json.schema_components(self._kinds, ref_template=COMPONENTS + "{name}")
        for schema in schemas.values():
            if "description" in schema:  # Up to 0.22 msgspec gives docstrings with their indentation.
                schema["description"] = inspect.cleandoc(schema["description"])
        return {
            "schemas": dict(sorted({**schemas, **self._schemas}.items())),
            "responses": dict(sorted(self._responses.items())),
        }

    def operation(self, route: Route, method: str) -> Schema:
        is_open = route.who in ("anyone", "browser")
        made: Schema = {
            "summary": route.summary,
            "description": _paragraphs(inspect.getdoc(route.endpoint) or "") if route.endpoint else "",
            "tags": [route.tag],
            "parameters": [
                *_parameters(route),
                *(
                    {"name": name, "in": "header", "required": False, "description": description, "schema": TEXT}
                    for name, description in _headers(route).items()
                ),
            ],
            "responses": {
                **{str(reply.status): self._reply(reply) for reply in route.replies},
                **self._errors([*route.errors, *(ANYONE if is_open else GUARDED)], route.passes_engines_errors),
            },
            # The cookie writes nothing but annotations, with PUT and DELETE.
            "security": [
                *SECURITY["admin" if route.who == "page" and method == "post" else route.who],
                *([] if route.limit is None else [{_RUN: []}]),
            ],
        }
        if (name := self._body_schema(route)) is not None:
            body: Schema = {"schema": {"$ref": COMPONENTS + name}}
            if route.example is not None:
                body["example"] = dict(route.example)
            made["requestBody"] = {"required": not route.optional_body, "content": {JSON: body}}
        return {name: value for name, value in made.items() if value or name == "security"}

    def _body_schema(self, route: Route) -> str | None:
        """The name of the body's schema, a component."""
        if route.protocol is not None:
            name = str(route.protocol.schema["title"])
            self._schemas[name] = dict(route.protocol.schema)
            return name
        if route.body is None:
            return None
        schema = route.body.model_json_schema(ref_template=COMPONENTS + "{model}")
        self._schemas |= {**schema.pop("$defs", {}), route.body.__name__: schema}
        return route.body.__name__

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


async def _turn_of_session(session_id: SessionId) -> None: ...


def _parameters(route: Route) -> list[Schema]:
    """Those of the endpoint; a route of turns has none, or the session in its path."""
    from app.export.formats import FORMATS, SHAPES  # an export's modules are imported at its first use

    if route.endpoint is not None:
        described = [*route.parameters.described(route.documented_path)]
    else:
        described = [*Parameters(_turn_of_session).described(route.documented_path)] if "{" in route.path else []
    for fields in described:
        if fields["name"] in ("format", "shape"):
            fields["schema"]["enum"] = list(FORMATS if fields["name"] == "format" else SHAPES)
    return described


def _headers(route: Route) -> Mapping[str, str]:
    return {RUN: "The run that the request is about.", **route.headers} if route.of_run == "header" else route.headers


def _paragraphs(text: str) -> str:
    """A docstring as a description: without line ends, and without its sentence about the Python errors raised."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "\n\n".join(paragraph.partition(" Raises ")[0] for paragraph in paragraphs)
