"""Routes of archives: closed sessions in object storage."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from app.api.bodies import body_of
from app.api.describe import ANYTHING, BODY, PAYLOADS, READ, WRITE, describe, json_reply
from app.api.state import services
from app.domain.patterns import ID
from app.errors import SessionNotFound, SessionUnreadable, Unsupported
from app.store.archives.rows import listed

router = APIRouter(tags=["Archives"])


class ArchiveAfter(BaseModel):
    """Where a step goes on: `after` of the step before."""

    model_config = ConfigDict(extra="forbid", strict=True)

    closed_at: float = Field(allow_inf_nan=False)
    session_id: str = Field(pattern=ID)


class ArchiveSessions(BaseModel):
    """The body of `POST /archives`; empty for the first step."""

    model_config = ConfigDict(extra="forbid", strict=True)

    closed_for_s: float = Field(
        default=0, ge=0, allow_inf_nan=False, description="Only sessions that were closed so many seconds ago."
    )
    after: ArchiveAfter | None = None


class ArchivedSessionId(BaseModel):
    """The body of `POST /archives/restore`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    session_id: str = Field(pattern=ID)


@router.post("/archives")
@describe(
    "Archive some closed sessions",
    "admin",
    json_reply(ANYTHING, "What was archived, and where the next step goes on; `after` is null at the end."),
    errors=(*BODY, *WRITE, *PAYLOADS, Unsupported),
    body=ArchiveSessions,
    example={"closed_for_s": 86400},
)
async def archive_sessions(request: Request) -> dict[str, Any]:
    """Move the next closed sessions into an archive: Parquet files in object storage. Repeat with `after` of the reply
    until it is null; turns go on meanwhile."""
    given = await body_of(request, ArchiveSessions, is_optional=True)
    archiver = services(request).archiver
    after = () if given.after is None else ((given.after.closed_at, given.after.session_id),)
    step = await archiver.step(given.closed_for_s, *after)
    names = ArchiveAfter.model_fields
    return {
        "archived": step.archived,
        "left": step.left,
        "bytes": step.bytes,
        "after": None if step.after is None else dict(zip(names, step.after, strict=True)),
    }


@router.get("/archives")
@describe("The archives", "admin", json_reply(ANYTHING, "All archives, oldest first."), errors=READ)
async def list_archives(request: Request) -> dict[str, Any]:
    """Each archive's name, when it was made, and how many sessions are in it and nowhere else."""
    found = await services(request).database.read(listed)
    return {"archives": [{"name": one.name, "created_at": one.created_at, "sessions": one.sessions} for one in found]}


@router.post("/archives/restore")
@describe(
    "Bring an archived session back into the database",
    "admin",
    json_reply(ANYTHING, "Whether it was archived."),
    errors=(*BODY, *WRITE, *PAYLOADS, SessionNotFound, SessionUnreadable),
    body=ArchivedSessionId,
    example={"session_id": "task-17-3"},
)
async def restore_archived(request: Request) -> dict[str, Any]:
    """Write the session's rows into the database again. A session that is there already stays as it is."""
    given = await body_of(request, ArchivedSessionId)
    restored = await services(request).archives.bring_back(given.session_id)
    return {"session_id": given.session_id, "restored": restored}
