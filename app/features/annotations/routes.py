"""The routes of annotations."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from app.api.parameters import SessionId
from app.api.requests import SHORT, Request, read_model
from app.api.routes import BINARY, BODY, JSON, NO_CONTENT, READ, SESSION, WRITE, Errors, Reply, Routes, json_reply
from app.domain.columns import Column
from app.domain.events import ColumnType, Over
from app.domain.patterns import ANNOTATION, MAX_INTEGER, TAG
from app.errors import InvalidRequest, NotFound
from app.export import jsontext
from app.features.annotations import bodies
from app.features.annotations.annotations import Annotations
from app.features.annotations.bodies import NPY, SAFETENSORS
from app.sessions.session_at import described
from turnlog import replies as reply_types

route = Routes("Sessions")

MAX_BODY = 64 << 20
"""Bytes of a body: a column of a long turn is data, not a label."""

MAX_NUMBERS = 1 << 20
"""Values in a JSON body, which is decoded without interruption; a file may hold more."""

Name = Annotated[str, Path(pattern=ANNOTATION, description="The annotation's name.")]
TurnNumber = Annotated[int, Path(ge=1, le=MAX_INTEGER, description="A committed turn.")]
Writer = Annotated[str | None, Query(pattern=TAG, description="Who wrote it: the name of a person or program.")]
StatedOver = Annotated[
    Over | None,
    Query(description="Of a binary body: the turn's sampled tokens (`output`), or all its new ones (`own`)."),
]
Format = Annotated[Literal["json", "npy", "safetensors"], Query(description="The format of a column.")]


class AnnotationBody(BaseModel):
    """The body of `PUT …/annotations/{name}`: a `value`, or a column's `values`, null where a token has none."""

    model_config = ConfigDict(extra="forbid")

    value: Any = None
    values: list[Any] | None = Field(default=None, json_schema_extra={"items": {"type": ["number", "null"]}})
    dtype: ColumnType | None = None
    over: Over | None = None
    writer: str | None = Field(default=None, pattern=TAG)


OF_SESSION, OF_TURN = "/sessions/{session_id}/annotations", "/sessions/{session_id}/turns/{turn}/annotations"
_VALUE = Reply("The annotation.", {JSON: reply_types.Annotation, NPY: BINARY, SAFETENSORS: BINARY})
_WRITE: Errors = (*BODY, *SESSION, NotFound, *WRITE)
_READ: Errors = (InvalidRequest, NotFound, *SESSION, *READ)


@route(
    f"PUT {OF_SESSION}/{{name}}",
    "Annotate a session",
    "page",
    json_reply(reply_types.Annotated),
    errors=_WRITE,
    body=AnnotationBody,
    largest=MAX_BODY,
    example={"value": "Loops on the same test.", "writer": "ann"},
    of_run="session",
)
async def put_of_session(
    request: Request, session_id: SessionId, name: Name, writer: Writer = None, over: StatedOver = None
) -> dict[str, Any]:
    """Write a JSON value on the session, also a closed one, replacing what it has under this name. A session's
    `note` and `tags` are in lists, too."""
    return await _put(request, session_id, None, name, writer, over)


@route(
    f"PUT {OF_TURN}/{{name}}",
    "Annotate a turn or its tokens",
    "page",
    json_reply(reply_types.Annotated),
    errors=_WRITE,
    body=AnnotationBody,
    largest=MAX_BODY,
    example={"values": [-0.25, None, -1.5], "dtype": "float32", "over": "output", "writer": "teacher"},
    of_run="session",
)
async def put_of_turn(
    request: Request,
    session_id: SessionId,
    turn: TurnNumber,
    name: Name,
    writer: Writer = None,
    over: StatedOver = None,
) -> dict[str, Any]:
    """Write a JSON value on the turn, or a column: one number for each of its tokens. With the `content-type`
    `application/x-npy` or `application/x-safetensors` the body is such a file, and `over` a parameter."""
    return await _put(request, session_id, turn, name, writer, over)


@route(
    f"GET {OF_SESSION}/{{name}}",
    "Get an annotation of a session",
    "session",
    json_reply(reply_types.Annotation),
    errors=_READ,
    of_run="session",
)
async def get_of_session(request: Request, session_id: SessionId, name: Name) -> Response:
    """An annotation of the session."""
    return await _get(request, session_id, None, name, "json")


@route(f"GET {OF_TURN}/{{name}}", "Get an annotation of a turn", "session", _VALUE, errors=_READ, of_run="session")
async def get_of_turn(
    request: Request, session_id: SessionId, turn: TurnNumber, name: Name, format: Format = "json"
) -> Response:
    """An annotation of a turn; a column as JSON, `.npy` or safetensors."""
    return await _get(request, session_id, turn, name, format)


@route(
    f"DELETE {OF_SESSION}/{{name}}",
    "Delete an annotation of a session",
    "page",
    NO_CONTENT,
    errors=(InvalidRequest, *SESSION, *WRITE),
    of_run="session",
)
async def delete_of_session(request: Request, session_id: SessionId, name: Name, writer: Writer = None) -> None:
    """Remove an annotation of the session, if there is one."""
    await _annotations(request).remove(session_id, None, name, writer)


@route(
    f"DELETE {OF_TURN}/{{name}}",
    "Delete an annotation of a turn",
    "page",
    NO_CONTENT,
    errors=(InvalidRequest, NotFound, *SESSION, *WRITE),
    of_run="session",
)
async def delete_of_turn(
    request: Request, session_id: SessionId, turn: TurnNumber, name: Name, writer: Writer = None
) -> None:
    """Remove an annotation of a turn, if there is one."""
    await _annotations(request).remove(session_id, turn, name, writer)


@route(
    f"GET {OF_SESSION}",
    "A session's annotations",
    "session",
    json_reply(reply_types.Annotations),
    errors=(*SESSION, *READ),
    of_run="session",
)
async def list_of_session(request: Request, session_id: SessionId) -> dict[str, Any]:
    """The annotations of the session and of all its turns, without their content."""
    return await _list(request, session_id, None)


@route(
    f"GET {OF_TURN}",
    "The annotations of a turn",
    "session",
    json_reply(reply_types.Annotations),
    errors=_READ,
    of_run="session",
)
async def list_of_turn(request: Request, session_id: SessionId, turn: TurnNumber) -> dict[str, Any]:
    """The annotations of a turn, without their content."""
    return await _list(request, session_id, turn)


async def _put(
    request: Request, session_id: str, turn: int | None, name: str, writer: str | None, over: Over | None
) -> dict[str, Any]:
    raw = await request.whole_body()
    kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    given: Any
    if len(raw) > SHORT:
        given, named = await asyncio.to_thread(_given, raw, kind, over)
    else:
        given, named = _given(raw, kind, over)
    seq = await _annotations(request).write(session_id, turn, name, given, named or writer)
    return {"session_id": session_id, "turn": turn, "name": name, "seq": seq}


def _given(raw: bytes, kind: str, over: Over | None) -> tuple[Any | Column, str | None]:
    """What a body gives, and the writer that it names. Raises InvalidRequest."""
    if kind in (NPY, SAFETENSORS):
        if over is None:
            raise InvalidRequest("a column requires over: output or own")
        return (bodies.from_npy if kind == NPY else bodies.from_safetensors)(raw, over), None
    body = read_model(raw, AnnotationBody, MAX_NUMBERS)
    over = body.over or over
    if body.values is None:
        if body.dtype is not None or over is not None:
            raise InvalidRequest("dtype and over are only for values")
        return body.value, body.writer
    if body.value is not None:
        raise InvalidRequest("value and values exclude each other")
    if over is None:
        raise InvalidRequest("values require over: output or own")
    return bodies.from_list(body.values, body.dtype or "float32", over), body.writer


async def _get(request: Request, session_id: str, turn: int | None, name: str, format: str) -> Response:
    said = await _annotations(request).read(session_id, turn, name)
    fields = {"session_id": session_id, "turn": turn, **described(name, said.annotation)}
    column = said.content if isinstance(said.content, Column) else None
    if column is None:
        if format != "json":
            raise InvalidRequest(f"format={format}: {name} is a JSON value, not a column")
        return Response(jsontext.encode({**fields, "value": said.content}), media_type=JSON)
    if format == "npy":
        return Response(bodies.to_npy(column), media_type=NPY)
    if format == "safetensors":
        return Response(bodies.to_safetensors(column), media_type=SAFETENSORS)
    return Response(
        await asyncio.to_thread(lambda: jsontext.encode({**fields, "values": bodies.to_list(column)})), media_type=JSON
    )


async def _list(request: Request, session_id: str, turn: int | None) -> dict[str, Any]:
    listed = await _annotations(request).listed(session_id, turn)
    every = [
        {"turn": of or None, **described(name, one)}
        for of in sorted(listed)
        for name, one in sorted(listed[of].items())
    ]
    return {"session_id": session_id, "annotations": every}


def _annotations(request: Request) -> Annotations:
    annotations: Annotations = request.services.features["annotations"]
    return annotations
