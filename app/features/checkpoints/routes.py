"""Routes that make, list, restore and delete checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field

from app.api.requests import Request
from app.api.routes import BODY, NO_CONTENT, READ, WRITE, Routes, json_reply
from app.domain.patterns import ID
from app.errors import CheckpointBusy, CheckpointExists, InvalidRequest, NotFound
from app.features.checkpoints.checkpoints import BEFORE, Checkpoints
from turnlog import replies as reply_types

route = Routes("Checkpoints")

DRAIN_S = 600.0
"""How long a drain waits for the turns in flight: generations may take minutes, and all other turns are held."""

MAX_DRAIN_S = 86_400

Name = Annotated[str, Path(pattern=ID, description="A checkpoint's name.")]


class NewCheckpoint(BaseModel):
    """The body of `POST /checkpoints`. `drain_s`: with `drain`, how long to wait for the turns in flight."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=ID)
    cut: Literal["now", "drain"] = "now"
    drain_s: float = Field(default=DRAIN_S, gt=0, le=MAX_DRAIN_S, allow_inf_nan=False)


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
    """Name a cut over all sessions, groups and acknowledgements.

    With `drain` new turns are held and the turns in flight are waited for, so no generation is cut. The content of its
    sessions is neither freed nor erased until the checkpoint is deleted, except by a client.
    """
    body = await request.body_of(NewCheckpoint)
    if body.name.startswith(BEFORE):
        raise InvalidRequest(f"name: names that begin with {BEFORE} are those of checkpoints that restores make")
    if not body.name.strip("."):
        raise InvalidRequest("name must not be only dots")  # a client may take it for a relative path
    drain_s = body.drain_s if body.cut == "drain" else None
    return fields(await _checkpoints(request).make(body.name, drain_s=drain_s))


@route(
    "GET /checkpoints",
    "List the checkpoints",
    "page",
    json_reply(reply_types.CheckpointList, "All checkpoints, the oldest first."),
    errors=READ,
    of_run="query",
)
async def list_checkpoints(request: Request) -> dict[str, Any]:
    return {"checkpoints": [fields(one) for one in await _checkpoints(request).every()]}


@route(
    "POST /checkpoints/{name}/restore",
    "Take the store back to a checkpoint",
    "admin",
    json_reply(reply_types.RestoredStore, "It is restored."),
    errors=(NotFound, CheckpointBusy, *WRITE),
    of_run="query",
)
async def restore_checkpoint(request: Request, name: Name) -> Mapping[str, Any]:
    """Make sessions, rewards, leases and acknowledgements what they were at the checkpoint; delete nothing.

    All turns are held meanwhile. Turns and sessions that came later are undone, claims are void, and export cursors
    end. What the store was is a checkpoint too, named in the reply. The restore goes on if the client does not wait,
    and after a crash.
    """
    return await _checkpoints(request).restore(name)


@route(
    "DELETE /checkpoints/{name}",
    "Delete a checkpoint",
    "admin",
    NO_CONTENT,
    errors=(NotFound, CheckpointBusy, *WRITE),
    of_run="query",
)
async def delete_checkpoint(request: Request, name: Name) -> None:
    """Delete the checkpoint; sessions stay as they are. What only it kept is freed as usual from now on."""
    await _checkpoints(request).delete(name)


def _checkpoints(request: Request) -> Checkpoints:
    checkpoints: Checkpoints = request.services.features["checkpoints"]
    return checkpoints


def fields(made: Any) -> dict[str, Any]:
    """A checkpoint as clients see it."""
    members: dict[str, Any] = msgspec.to_builtins(made)
    del members["id"]
    return members
