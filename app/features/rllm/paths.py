"""Leads the gateway's paths that Turnlog has with another meaning to this feature's routes.

    POST /sessions                          /rllm/sessions, which also does what `POST /sessions` does
    GET /sessions                           /rllm/sessions, unless a parameter of Turnlog's own is asked for
    POST /sessions/batch_delete             /rllm/sessions/batch_delete
    GET, DELETE /sessions/{name}            /sessions/{id}/rllm, unless there is a query
    GET /sessions/{name}/traces             /sessions/{id}/traces
    any /sessions/{name}/v1/…               /v1/…, with the session in a header, which makes it at its first turn;
                                            unless the query asks for a generation

A name may hold slashes. It ends before the first `/v1/`, the last `/traces`, or a part of Turnlog's own paths
(`/sessions/{id}/events`). Guard and routers see the result alone, so they cannot differ over whose session it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Scope

from app.api.head import GENERATION, route_path
from app.api.header_sessions import in_header
from app.api.parameters import InvalidParameters
from app.errors import AppError
from app.features.rllm.rules import id_of
from app.upstream.headers import Headers

_SESSIONS = "/sessions"
_TRACES = "/traces"
_TURN = re.compile(r"/sessions/(.+?)(/inference/v1/generate|/generate|/v1(?:/.*)?)", re.DOTALL)
_GATEWAYS_FILTERS = frozenset({"since", "limit"})
_READS = ("GET", "HEAD")


class Door:
    """`parts`: what follows `/sessions/{id}/` in Turnlog's own paths."""

    def __init__(self, parts: Collection[str]) -> None:
        self._parts = parts

    def __call__(self, scope: Scope) -> Scope:
        path, method, query = route_path(scope), scope["method"], scope["query_string"]
        if path in (_SESSIONS, _SESSIONS + "/"):
            is_gateways = method == "POST" or (method in _READS and _names(query) <= _GATEWAYS_FILTERS)
            return _at(scope, "/rllm/sessions") if is_gateways else scope
        if not path.startswith(_SESSIONS + "/"):
            return scope
        if path == "/sessions/batch_delete" and method == "POST":
            return _at(scope, "/rllm/sessions/batch_delete")
        if (turn := _TURN.fullmatch(path)) and GENERATION not in query:
            name, rest = turn.groups()
            return in_header(_at(scope, rest), id_of(name))
        name = path[len(_SESSIONS) + 1 :].rstrip("/")
        if name.endswith(_TRACES) and method in _READS:
            return _at(scope, f"/sessions/{id_of(name.removesuffix(_TRACES))}/traces")
        _, slash, rest = name.partition("/")
        is_turnlogs = bool(slash) and rest.partition("/")[0] in self._parts
        is_whole = name and not query and method in ("GET", "DELETE") and not is_turnlogs
        return _at(scope, f"/sessions/{id_of(name)}/rllm") if is_whole else scope


def _names(query: bytes) -> set[str]:
    return {name for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True)}


def _at(scope: Scope, path: str) -> Scope:
    """The scope of the same request to another path."""
    whole = scope["path"][: len(scope["path"]) - len(route_path(scope))] + path
    return {**scope, "path": whole, "raw_path": whole.encode("utf-8", "surrogatepass")}


def spoken(error: AppError) -> tuple[int, Headers, bytes]:
    """How the gateway's routes say what is wrong: `{"error": text}`, and 422 `{"detail": […]}` for a parameter."""
    headers: Headers = [("content-type", "application/json")]
    if isinstance(error, InvalidParameters):
        return 422, headers, msgspec.json.encode({"detail": error.errors})
    return error.status, [*headers, *error.headers().items()], msgspec.json.encode({"error": str(error)})
