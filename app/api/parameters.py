"""Reads what an endpoint's signature names from a request's path, query and headers.

A parameter is annotated as FastAPI's are: `Annotated[int, Query(ge=1)]`. A query may also be one model of pydantic's;
with `extra="forbid"` it refuses unknown names, since a misspelt filter would filter nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from fastapi import Path, Query
from fastapi.params import Param
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import Request

from app.api.head import invalid_session_id
from app.domain.patterns import ID, NO_NUL
from app.domain.selection import fields_of
from app.errors import InvalidRequest

SessionId = Annotated[str, Path(description="A session's id.", json_schema_extra={"pattern": ID})]

RunName = Annotated[str, Path(pattern=ID, description="A run's name.")]
"""An invalid one is an unknown session, found without a look into the database."""

Cursor = Annotated[str | None, Query(pattern=NO_NUL, description="Where to continue: the cursor of an earlier reply.")]

LIMIT = "Maximum number of items."

_SOURCES = ("path", "query", "header")


class InvalidParameters(InvalidRequest):
    """`errors` as pydantic tells them, each `loc` with the source before the name."""

    def __init__(self, message: str, errors: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.errors = errors


class _Parameter(NamedTuple):
    """`name` in the signature, `sent_name` in the request. `lists`: which names of a query may come more than once;
    `maps`: which ones begin a name, with a dot and a key behind them. `names`: of a query that is one model, those that
    it knows."""

    name: str
    sent_name: str
    source: str
    adapter: TypeAdapter[Any]
    default: Any
    lists: frozenset[str]
    maps: frozenset[str]
    names: frozenset[str] | None


class Parameters:
    """The parameters of one endpoint."""

    def __init__(self, endpoint: Callable[..., Any]) -> None:
        kinds = get_type_hints(endpoint, include_extras=True)
        signature = inspect.signature(endpoint).parameters
        made = [_parameter(name, kinds[name], given.default) for name, given in signature.items()]
        self._parameters = sorted(filter(None, made), key=lambda one: _SOURCES.index(one.source))

    def read(self, request: Request, path_values: Mapping[str, str]) -> dict[str, Any]:
        """The arguments by name. Raises SessionNotFound for an invalid id of a session, InvalidParameters."""
        session_id = path_values.get("session_id")
        if session_id is not None and (invalid := invalid_session_id(session_id)) is not None:
            raise invalid
        values: dict[str, Any] = {}
        errors: list[Any] = []
        for one in self._parameters:
            given: Any
            if one.source == "path":
                given = path_values.get(one.sent_name)  # An endpoint may answer at paths with it and without.
            elif one.source == "header":
                given = request.headers.get(one.sent_name)
            elif one.names is not None:
                given = fields_of(request.query_params.multi_items(), one.lists, one.maps)
            elif not request.scope["query_string"]:
                given = None
            else:
                query = request.query_params
                given = (query.getlist(one.sent_name) or None) if one.lists else query.get(one.sent_name)
            if given is None and one.default is not inspect.Parameter.empty:
                values[one.name] = one.default
                continue
            place = (one.source,) if one.names is not None else (one.source, one.sent_name)
            if given is None:
                errors.append({"type": "missing", "loc": place, "msg": "Field required", "input": None})
                continue
            try:
                values[one.name] = one.adapter.validate_python(given)
            except ValidationError as error:
                errors += [
                    {**each, "loc": (*place, *each["loc"])}
                    for each in error.errors(include_url=False, include_context=False)
                ]
        if errors:
            raise InvalidParameters(self._message(errors[0], request), errors)
        return values

    def names_in(self, source: str) -> Iterator[str]:
        """Names of the parameters that are read from there."""
        for one in self._parameters:
            if one.source == source:
                yield from (one.sent_name,) if one.names is None else one.names

    def described(self, path: str) -> Iterator[dict[str, Any]]:
        """The parameters as the OpenAPI document has them for a route with this documented path. None of them can be
        null: an optional one is left out."""
        for one in self._parameters:
            if one.source == "path" and f"{{{one.sent_name}}}" not in path:
                continue
            schema = one.adapter.json_schema()
            assert "$defs" not in schema, f"{one.names or one.sent_name}: the document has no components of parameters"
            if one.names is None:
                is_required = one.source == "path" or one.default is inspect.Parameter.empty
                given = {} if is_required else {"default": one.default}
                schema = {"properties": {one.sent_name: schema | given}, "required": [one.sent_name] * is_required}
            for name, field in schema["properties"].items():
                default, description = field.pop("default", None), field.pop("description", None)
                field.pop("title", None)
                choices = [choice for choice in field.pop("anyOf", ()) if choice != {"type": "null"}]
                field |= choices[0] if len(choices) == 1 else {"anyOf": choices} if choices else {}
                made = {"name": name, "in": one.source, "required": name in schema.get("required", ()), "schema": field}
                if name in one.maps:  # each property of the object is a parameter of its own
                    field["propertyNames"] = {"pattern": rf"^{name}\..+$"}
                    made |= {"style": "form", "explode": True}
                elif default is not None:
                    field["default"] = default
                yield made if description is None else {**made, "description": description}

    def _message(self, error: Mapping[str, Any], request: Request) -> str:
        place = ".".join(map(str, error["loc"][1:]))
        if error["type"] == "extra_forbidden":
            known = next(one.names for one in self._parameters if one.names is not None)
            return (
                f"{place} is not a parameter of {request.scope['path']}; supported are {', '.join(sorted(known or ()))}"
            )
        given = f"={error['input']:.64}" if isinstance(error["input"], str) else ""
        return f"{place}{given}: {error['msg'].removeprefix('Value error, ')}"


def _parameter(name: str, kind: Any, default: Any) -> _Parameter | None:
    """None: the request itself."""
    info = next((each for each in reversed(get_args(kind)) if isinstance(each, Param)), None)
    if info is None:
        return None
    bare, source = get_args(kind)[0], info.in_.value
    is_model = isinstance(bare, type) and issubclass(bare, BaseModel)
    fields = bare.model_fields if is_model else {}
    lists = {each for each, field in fields.items() if _is(list, field.annotation)} or (
        {name} if _is(list, bare) else set()
    )
    maps = {each for each, field in fields.items() if _is(dict, field.annotation)}
    sent_name = info.alias or (name.replace("_", "-") if source == "header" else name)
    names = frozenset(fields) - maps | {f"{each}.<key>" for each in maps} if is_model else None
    return _Parameter(name, sent_name, source, TypeAdapter(kind), default, frozenset(lists), frozenset(maps), names)


def _is(container: type, kind: Any) -> bool:
    if get_origin(kind) in (Annotated, Union, UnionType):
        return any(_is(container, each) for each in get_args(kind))
    return get_origin(kind) is container
