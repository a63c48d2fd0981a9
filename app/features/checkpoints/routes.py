"""Routes that make, list, restore and delete checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field

from app.api.requests import Request, require_finite, require_small
from app.api.routes import BODY, NO_CONTENT, READ, WRITE, Routes, json_reply
from app.domain.events import DEFAULT_RUN
from app.domain.patterns import ID, RUN_OR_ALL
from app.domain.selection import Metadata
from app.errors import CheckpointBusy, CheckpointExists, InvalidRequest, NotFound
from app.features.checkpoints.checkpoints import BEFORE, Checkpoints
from turnlog import replies as reply_types

route = Routes("Checkpoints")

DRAIN_S = 600.0
"""How long a drain waits for the turns in flight: generations may take minutes, and all other turns are held."""

MAX_DRAIN_S = 86_400

Name = Annotated[str, Path(pattern=ID, description="A checkpoint's name.")]
Run = Annotated[str, Query(pattern=RUN_OR_ALL, description="The checkpoint's run; `*`: it is the whole store's.")]


class CheckpointQuery(BaseModel):
    """Which checkpoints a list has."""

    model_config = ConfigDict(extra="forbid")

    run: str | None = Field(
        default=None,
        pattern=RUN_OR_ALL,
        description="Only checkpoints of this run; `*`: only those of the whole store.",
    )
    metadata: Metadata = Field(
        default={}, description="`metadata.<key>=<value>`: only checkpoints whose metadata has this value."
    )


class NewCheckpoint(BaseModel):
    """The body of `POST /checkpoints`. `run`: `*` for the whole store. `drain_s`: with `drain`, how long to wait for
    the turns in flight."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=ID)
    run: str = Field(default=DEFAULT_RUN, pattern=RUN_OR_ALL)
    cut: Literal["now", "drain"] = "now"
    drain_s: float = Field(default=DRAIN_S, gt=0, le=MAX_DRAIN_S, allow_inf_nan=False)
    metadata: dict[str, Any] | None = None


@route(
    "POST /checkpoints",
    "Make a checkpoint",
    "admin",
    json_reply(reply_types.Checkpoint, "It is made."),
    errors=(*BODY, CheckpointExists, CheckpointBusy, *WRITE),
    body=NewCheckpoint,
    example={"name": "step-40", "cut": "drain"},
    of_run="body",
)
async def make_checkpoint(request: Request) -> dict[str, Any]:
    """Save the state of all sessions, groups and acknowledgements of a run, by default the default run.

    With `drain` the run's new turns are held and its turns in flight are waited for, so no generation is cut. The
    content of its sessions is neither freed nor erased until the checkpoint is deleted, except by a client.
    """
    body = await request.body_of(NewCheckpoint)
    if body.name.startswith(BEFORE):
        raise InvalidRequest(f"name must not begin with {BEFORE}, which is reserved for checkpoints that restores make")
    if not body.name.strip("."):
        raise InvalidRequest("name must not be only dots")  # a client may take it for a relative path
    require_finite(body.metadata, "metadata")
    require_small("metadata has", body.metadata)
    drain_s = body.drain_s if body.cut == "drain" else None
    metadata = None if body.metadata is None else msgspec.json.encode(body.metadata)
    return fields(await _checkpoints(request).make(body.run, body.name, drain_s=drain_s, metadata=metadata))


@route(
    "GET /checkpoints",
    "List the checkpoints",
    "page",
    json_reply(reply_types.CheckpointList, "The checkpoints, the oldest first."),
    errors=(InvalidRequest, *READ),
    of_run="query",
)
async def list_checkpoints(request: Request, wanted: Annotated[CheckpointQuery, Query()]) -> dict[str, Any]:
    """The checkpoints of a run, or of all runs and of the whole store."""
    found = await _checkpoints(request).every(wanted.run, wanted.metadata)
    return {"checkpoints": [fields(one) for one in found]}


@route(
    "POST /checkpoints/{name}/restore",
    "Restore a run to a checkpoint",
    "admin",
    json_reply(reply_types.RestoredStore, "It is restored."),
    errors=(InvalidRequest, NotFound, CheckpointBusy, *WRITE),
    of_run="query",
)
async def restore_checkpoint(request: Request, name: Name, run: Run = DEFAULT_RUN) -> Mapping[str, Any]:
    """Restore the run's sessions, rewards, leases and acknowledgements to its checkpoint; nothing is deleted.

    The run's turns are held meanwhile. Its turns and sessions that came later are undone, its claims are void, and
    cursors of its exports end; other runs go on. What it was is a checkpoint too, named in the reply. The restore goes
    on if the client does not wait, and after a crash.
    """
    return await _checkpoints(request).restore(run, name)


@route(
    "DELETE /checkpoints/{name}",
    "Delete a checkpoint",
    "admin",
    NO_CONTENT,
    errors=(InvalidRequest, NotFound, CheckpointBusy, *WRITE),
    of_run="query",
)
async def delete_checkpoint(request: Request, name: Name, run: Run = DEFAULT_RUN) -> None:
    """Delete the checkpoint; sessions stay as they are. What only it kept is freed as usual from now on."""
    await _checkpoints(request).delete(run, name)


def _checkpoints(request: Request) -> Checkpoints:
    checkpoints: Checkpoints = request.services.features["checkpoints"]
    return checkpoints


def fields(made: Any) -> dict[str, Any]:
    """A checkpoint as clients see it."""
    members: dict[str, Any] = msgspec.to_builtins(made)
    del members["id"]
    members["metadata"] = None if made.metadata is None else msgspec.json.decode(made.metadata)
    return members
