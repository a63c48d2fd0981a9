"""Routes of runs: list them, look at one, give it limits, close and erase it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from app.api.parameters import LIMIT, Cursor, RunName
from app.api.requests import Request, require_finite, require_small
from app.api.routes import BODY, NO_CONTENT, READ, WRITE, Reply, Routes, json_reply
from app.domain.patterns import MAX_INTEGER, NO_NUL
from app.errors import InvalidRequest, NotFound, RunClosed, SessionUnreadable
from app.features.runs.operations import GiveRun
from app.features.runs.runs import Runs
from turnlog import replies as reply_types

route = Routes("Runs")


ERASING = Reply(
    "Erased from the database; object storage or archives may still have some of it: repeat the request.",
    {},
    status=202,
)


class LimitsOfRun(BaseModel):
    """The field `limits` of a run. `live`: sessions that are open at a time; `tokens`: sampled tokens in all."""

    model_config = ConfigDict(extra="forbid", strict=True)

    live: int | None = Field(default=None, ge=1, le=MAX_INTEGER)
    tokens: int | None = Field(default=None, ge=1, le=MAX_INTEGER)


class GivenRun(BaseModel):
    """The body of `PUT /runs/{run}`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    limits: LimitsOfRun = LimitsOfRun()
    metadata: dict[str, Any] | None = None
    note: str | None = Field(default=None, max_length=10_000, pattern=NO_NUL)


@route(
    "GET /runs",
    "List runs, ordered by name",
    "page",
    json_reply(reply_types.RunPage, "One page of runs."),
    errors=(InvalidRequest, *READ),
)
async def list_runs(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000, description=LIMIT)] = 100,
    cursor: Cursor = None,
) -> object:
    """Runs with their sessions, turns, groups and rewards, by name."""
    return await _runs(request).page(cursor, limit)


@route(
    "GET /runs/{run}",
    "A run's figures",
    "page",
    json_reply(reply_types.Run, "The run."),
    errors=(InvalidRequest, NotFound, *READ),
    of_run="path",
)
async def get_run(request: Request, run: RunName) -> Mapping[str, Any]:
    """A run's sessions, turns, tokens, groups, rewards, errors and weight versions, from the log."""
    return await _runs(request).get(run)


@route(
    "PUT /runs/{run}",
    "Set a run's limits, metadata and note",
    "admin",
    json_reply(reply_types.Run, "The run."),
    errors=(*BODY, RunClosed, *WRITE),
    body=GivenRun,
    optional_body=True,
    example={"limits": {"live": 512}, "note": "baseline"},
)
async def put_run(request: Request, run: RunName) -> Mapping[str, Any]:
    """Set a run's limits, metadata and note, in place of those before. The run need not have a session yet."""
    if not run.strip("."):
        raise InvalidRequest("run must not be only dots")  # a client may take it for a relative path
    body = await request.body_of(GivenRun)
    require_finite(body.metadata, "metadata")
    require_small("metadata has", body.metadata)
    metadata = None if body.metadata is None else msgspec.json.encode(body.metadata)
    note = None if body.note is None else body.note.encode()
    await _runs(request).give(GiveRun(run, body.limits.live, body.limits.tokens, metadata, note))
    return await _runs(request).get(run)


@route(
    "DELETE /runs/{run}",
    "Close or erase a run",
    "admin",
    NO_CONTENT,
    ERASING,
    errors=(InvalidRequest, NotFound, SessionUnreadable, *WRITE),
    of_run="path",
)
async def delete_run(
    request: Request,
    run: RunName,
    erase: Annotated[bool, Query(description="Also delete the content permanently, and free the name.")] = False,
) -> Response:
    """Close a run with its open sessions: no session can be created in it any more. Idempotent.

    With `?erase=true` all of its sessions are erased as `DELETE /sessions/{session_id}?erase=true` does, and the name
    may be used anew. 202: object storage or archives may still have some of it, or it is being taken back to a
    checkpoint; the server goes on, repeat until 204.
    """
    if not erase:
        await _runs(request).close(run)
        return Response(status_code=204)
    is_gone = await _runs(request).erase(run)
    return Response(status_code=204 if is_gone else 202)


def _runs(request: Request) -> Runs:
    runs: Runs = request.services.features["runs"]
    return runs
