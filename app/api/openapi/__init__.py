"""Makes the OpenAPI document from FastAPI's routes, their `describe` and the turns' own routes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from app.api.auth import COOKIE
from app.api.describe import JSON, Reply, RouteDescription, Schema, Who, operation_of
from app.api.openapi import turns
from app.api.openapi.schemas import components, error_replies, header, of_model
from app.errors import AppError, Forbidden, HeadersTooLarge, TargetTooLong, Unauthorized
from app.export.formats import FORMATS, SHAPES
from app.protocols.registry import ROUTES

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
        "description": "`token` of the reply that created the session: for it alone. `x-api-key` may hold it, too.",
    },
    _COOKIE: {
        "type": "apiKey",
        "in": "cookie",
        "name": COOKIE.decode(),
        "description": "What `POST /ui/sign-in` gives.",
    },
}


_CHOICES: Mapping[str, Iterable[str]] = {"format": FORMATS, "shape": SHAPES}

TAGS: Mapping[str, str] = {
    "Sessions": "Create, read, reward, close.",
    "Turns": f"The OpenAI API: {', '.join(f'`{path}`' for path in ROUTES)}.",
    "Export": "Training rows, and groups for trainers.",
    "Fleet": "Engines, adapters, gates.",
    "Search": "Messages over all sessions.",
    "Checkpoints": "Named cuts over all sessions, and the way back.",
    "Payloads": "Replay payloads in object storage.",
    "SkyRL": "SkyRL's own routes for the gates.",
    "Service": "Is it alive, what does it do?",
    "Page": "What the web page asks for.",
}


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI 3.1 document of all routes of `app`."""
    schemas = {**components(), **turns.SCHEMAS}
    responses: dict[str, Schema] = {}
    paths = turns.paths(GUARDED, SECURITY["session"], responses)
    known = get_openapi(title=app.title, version=app.version, routes=app.routes)["paths"]
    for route in _routes(app.routes):
        for method, found in known.get(route.path_format, {}).items():
            if route.include_in_schema and method.upper() in (route.methods or ()):
                operation = _operation(operation_of(route.endpoint), found, schemas, responses)
                paths.setdefault(route.path_format, {})[method] = operation
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


def _routes(routes: Iterable[BaseRoute]) -> Iterator[APIRoute]:
    """All routes, also those of included routers, which newer versions of FastAPI keep as one route."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif (router := getattr(route, "original_router", None)) is not None:
            yield from _routes(router.routes)


def _operation(
    known: RouteDescription, found: Schema, schemas: dict[str, Schema], responses: dict[str, Schema]
) -> Schema:
    """The operation of a route; models and error replies are added to the components."""
    parameters = [_parameter(one) for one in found.get("parameters", ())]
    errors = [*known.errors, *(ANYONE if known.who == "anyone" else GUARDED)]
    made: Schema = {
        "summary": known.summary,
        "description": _paragraphs(found.get("description", "")),
        "tags": found["tags"],
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
    """A query parameter cannot be null: an optional one is left out."""
    schema = dict(found["schema"])
    one_of = [choice for choice in schema.pop("anyOf", ()) if choice != {"type": "null"}]
    schema |= one_of[0] if len(one_of) == 1 else {"anyOf": one_of} if one_of else {}
    for name in ("title", "description"):
        schema.pop(name, None)
    if found["name"] in _CHOICES:
        schema["enum"] = list(_CHOICES[found["name"]])
    return {**found, "schema": schema}


def _paragraphs(text: str) -> str:
    """A docstring as a description: without line ends, and without its sentence about the Python errors raised."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "\n\n".join(paragraph.partition(" Raises ")[0] for paragraph in paragraphs)
