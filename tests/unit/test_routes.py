"""The table of routes, and how an endpoint's parameters are read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Annotated, Any, cast

import pytest
from fastapi import Header, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from app.api.head import Head, request_ids
from app.api.parameters import InvalidParameters, SessionId
from app.api.requests import Request
from app.api.routes import Route, Routes, Table
from app.errors import AppError, MethodNotAllowed, NotFound, SessionNotFound
from app.main import create_app
from app.services import Services
from app.settings import FEATURES, Settings

route = Routes("Tests")


class Filter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: int = Field(default=1, ge=1)
    tags: list[str] | None = None


@route("GET /sessions/{session_id}/things/{number}", "A thing", "session")
async def thing(
    request: Request,
    session_id: SessionId,
    number: Annotated[int, Path(ge=1)],
    flag: Annotated[bool, Query()] = False,
    some_key: Annotated[str | None, Header()] = None,
) -> dict[str, Any]:
    return {"session_id": session_id, "number": number, "flag": flag, "key": some_key}


@route("GET, HEAD /names/{name:path}", "A name", "page")
async def named(request: Request, name: Annotated[str, Path()]) -> str:
    return name


@route("GET /versions/{number}/notes.txt", "Notes", "page")
async def notes(request: Request, number: Annotated[int, Path()]) -> int:
    return number


@route("GET /names", "All", "anyone")
async def names(request: Request, query: Annotated[Filter, Query()]) -> dict[str, Any]:
    return query.model_dump()


TABLE = Table(route.entries)


def head_of(path: str, method: str = "GET", query: bytes = b"", headers: dict[str, str] | None = None) -> Head:
    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": raw, "client": None}
    return Head(scope, request_ids())


def asked(path: str, method: str = "GET", query: bytes = b"", headers: dict[str, str] | None = None) -> Any:
    async def receive() -> Any: ...

    head = head_of(path, method, query, headers)
    found = TABLE.find(head)
    request = Request(cast(Services, SimpleNamespace()), found, head, receive)
    assert found.endpoint is not None
    return asyncio.run(cast(Any, found.endpoint(request, **found.parameters.read(request, request.path_values))))


def test_parameters_are_read_from_where_they_are() -> None:
    given = asked("/sessions/a/things/7", query=b"flag=1&other=x", headers={"some-key": "k"})
    assert given == {"session_id": "a", "number": 7, "flag": True, "key": "k"}
    assert asked("/sessions/a/things/7") == {"session_id": "a", "number": 7, "flag": False, "key": None}
    assert asked("/names/a/b\nc//") == "a/b\nc//"
    assert asked("/versions/7/notes.txt") == 7
    with pytest.raises(NotFound):  # A dot in a path is a dot.
        asked("/versions/7/notes-txt")
    assert asked("/names", query=b"size=2&tags=x&tags=y") == {"size": 2, "tags": ["x", "y"]}


@pytest.mark.parametrize(
    ("path", "query", "message"),
    [
        ("/sessions/a/things/0", b"", "number=0: Input should be greater than or equal to 1"),
        ("/sessions/a/things/1", b"flag=perhaps", "flag=perhaps: Input should be a valid boolean"),
        ("/names", b"size=0&tag=x", "size=0: Input should be greater than or equal to 1"),
        ("/names", b"tag=x", "tag is not a parameter of /names; supported are size, tags"),
    ],
)
def test_a_bad_parameter_is_named(path: str, query: bytes, message: str) -> None:
    with pytest.raises(InvalidParameters, match="^" + message):
        asked(path, query=query)


def test_an_invalid_session_is_none() -> None:
    with pytest.raises(SessionNotFound):
        asked("/sessions/a b/things/0")


@pytest.mark.parametrize(
    ("path", "method", "error", "message"),
    [
        ("/nowhere", "GET", NotFound, "there is no route GET /nowhere"),
        ("/names", "PATCH", MethodNotAllowed, "PATCH is not supported on /names; supported: GET"),
        ("/names/a", "POST", MethodNotAllowed, "POST is not supported on /names/a; supported: GET, HEAD"),
        ("/v1/v1/messages", "POST", NotFound, "the path has /v1 twice"),
    ],
)
def test_an_unknown_route_says_what_there_is(path: str, method: str, error: type[AppError], message: str) -> None:
    with pytest.raises(error, match=message):
        asked(path, method)


def test_a_slash_at_the_end_does_not_matter_but_opens_nothing() -> None:
    for route in create_app(Settings(features=FEATURES)).table.routes:
        if "{" in route.path.removeprefix("/sessions/{session_id}") or route.path == "/":
            continue
        path = route.path.replace("{session_id}", "a")
        table = Table([route])
        for method in route.methods:
            exact, slashed = table.find(head_of(path, method)), table.find(head_of(path + "/", method))
            assert exact is route
            assert slashed.who == ("page" if route.who in ("anyone", "browser") else route.who) or route.protocol
            assert slashed.endpoint is route.endpoint or route.protocol


def test_of_two_routes_that_fit_the_one_without_parameters_decides() -> None:
    assert TABLE.find(head_of("/names/")).endpoint is names
    assert TABLE.find(head_of("/names/x")).endpoint is named
    assert isinstance(TABLE.find(head_of("/names")), Route)
