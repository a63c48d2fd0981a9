"""The OpenAPI document: FastAPI's own, with what it cannot know of these routes.

Bodies are read by hand, 422 is 400 here, replies are streams and structs, and the routes that generate are none of
FastAPI's. What it knows, the parameters of every route, is taken from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from app.api.auth import COOKIE
from app.api.openapi import turns
from app.api.openapi.meanings import PARAMETERS, TAGS
from app.api.openapi.operations import OPERATIONS, PAGES_OWN, Operation, Reply, Who
from app.api.openapi.schemas import JSON, Schema, components, error_replies, header, of_model
from app.api.sessions import SESSION_ID
from app.errors import AppError, Forbidden, HeadersTooLarge, TargetTooLong, Unauthorized
from app.export.formats import FORMATS, SHAPES

ANYONE: tuple[type[AppError], ...] = (TargetTooLong, HeadersTooLarge, AppError)
GUARDED: tuple[type[AppError], ...] = (Unauthorized, Forbidden, *ANYONE)

_ADMIN, _SESSION, _COOKIE = "adminToken", "sessionToken", "pageCookie"

SECURITY: Mapping[Who, list[dict[str, list[str]]]] = {
    "anyone": [],
    "admin": [{_ADMIN: []}],
    "page": [{_ADMIN: []}, {_COOKIE: []}],
    "session": [{_ADMIN: []}, {_SESSION: []}],
}

SCHEMES: Mapping[str, Schema] = {
    _ADMIN: {
        "type": "http",
        "scheme": "bearer",
        "description": "One of `TURNLOG_ADMIN_TOKEN`; without any, none is needed.",
    },
    _SESSION: {
        "type": "http",
        "scheme": "bearer",
        "description": "`token` of the reply that created the session: for it alone.",
    },
    _COOKIE: {
        "type": "apiKey",
        "in": "cookie",
        "name": COOKIE.decode(),
        "description": "What `POST /ui/sign-in` gives.",
    },
}


_CHOICES: Mapping[str, Iterable[str]] = {"format": FORMATS, "shape": SHAPES}

_HIDDEN: Mapping[str, Schema] = {
    "GET /ui": {},
    "GET /ui/static/{name}": {
        "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
    },
}
"""Routes that FastAPI is told not to speak of."""


def document(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1, of all routes of `app`."""
    schemas = {**components(), **turns.SCHEMAS}
    responses: dict[str, Schema] = {}
    paths = turns.paths(GUARDED, SECURITY["session"], responses)
    for name, found in {**_HIDDEN, **_of_fastapi(app)}.items():
        method, _, path = name.partition(" ")
        operation = _operation(OPERATIONS.get(name, PAGES_OWN), found, schemas, responses)
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Turnlog",
            "version": app.version,
            "description": "A durable session server between agent harnesses and inference engines.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": {path: paths[path] for path in sorted(paths)},
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": dict(sorted(responses.items())),
            "securitySchemes": dict(SCHEMES),
        },
    }


def _of_fastapi(app: FastAPI) -> dict[str, Schema]:
    """What it knows of each operation, by method and path."""
    paths = get_openapi(title=app.title, version=app.version, routes=app.routes)["paths"]
    return {f"{method.upper()} {path}": found for path, methods in paths.items() for method, found in methods.items()}


def _operation(known: Operation, found: Schema, schemas: dict[str, Schema], responses: dict[str, Schema]) -> Schema:
    """What the document says of it; models and error replies are put among the components."""
    parameters = [_parameter(one) for one in found.get("parameters", ())]
    errors = [*known.errors, *(ANYONE if known.who == "anyone" else GUARDED)]
    made: Schema = {
        "summary": known.summary,
        "description": _paragraphs(found.get("description", "")),
        "tags": [known.tag],
        "parameters": parameters,
        "responses": {
            **{str(reply.status): _reply(reply) for reply in known.replies},
            **error_replies(errors, responses, engines_too=known.passes_engines_errors),
        },
        "security": SECURITY[known.who],
    }
    if known.body is not None:
        body: Schema = {"schema": of_model(known.body, schemas)}
        if known.example is not None:
            body["example"] = dict(known.example)
        made["requestBody"] = {"required": not known.optional_body, "content": {JSON: body}}
    return {name: value for name, value in made.items() if value or name == "security"}


def _reply(reply: Reply) -> Schema:
    made: Schema = {"description": reply.description}
    if reply.headers:
        made["headers"] = {name: header(name) for name in reply.headers}
    if reply.content:
        made["content"] = {media_type: {"schema": schema} for media_type, schema in reply.content.items()}
    return made


def _parameter(found: Schema) -> Schema:
    """A parameter that is left out is no null: a query cannot hold one."""
    name = found["name"]
    schema = dict(found["schema"])
    one_of = [choice for choice in schema.pop("anyOf", ()) if choice != {"type": "null"}]
    if one_of:
        schema |= one_of[0]
    schema.pop("title", None)
    if found["in"] == "path" and name == "session_id":
        schema["pattern"] = SESSION_ID
    if name in _CHOICES:
        schema["enum"] = list(_CHOICES[name])
    return {**found, "description": PARAMETERS.get(name, ""), "schema": schema}


def _paragraphs(text: str) -> str:
    """Without the ends of a docstring's lines, and without what it says to those who call it from Python."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "\n\n".join(paragraph.partition(" Raises ")[0] for paragraph in paragraphs)
