"""Routes of archives."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from app.api.requests import Request
from app.api.routes import BODY, PAYLOADS, WRITE, Routes, json_reply
from app.domain.patterns import ID
from app.domain.selection import Selection
from app.errors import ArchiveBusy, NotFound, Unsupported
from app.features.archive.archive import Archive
from app.features.archive.rows import Place
from turnlog.replies import ArchiveStep, ImportedFile

route = Routes("Archives")

MOST = 10_000
"""Rollouts that one request looks at."""


class After(BaseModel):
    """Where a request goes on: `after` of the reply before."""

    model_config = ConfigDict(extra="forbid", strict=True)

    closed_at: float = Field(allow_inf_nan=False)
    session_id: str = Field(pattern=ID)


class ArchiveSessions(Selection):
    """The body of `POST /archives`. `to` is a folder's URL: `s3://…`, `gs://…`, `az://…`, `file:///…`. The conditions
    are on a rollout's root."""

    model_config = ConfigDict(extra="forbid", strict=True)

    to: str = Field(max_length=1024)
    older_than_s: float = Field(ge=0, allow_inf_nan=False, description="Since the root was closed.")
    limit: int = Field(default=1000, ge=1, le=MOST, description="Rollouts that one request looks at.")
    after: After | None = None


class ImportFile(BaseModel):
    """The body of `POST /archives/import`: a file's URL."""

    model_config = ConfigDict(extra="forbid", strict=True)

    file: str = Field(max_length=1024)


@route(
    "POST /archives",
    "Archive some closed rollouts",
    "admin",
    json_reply(ArchiveStep, "What was archived, and where the next request continues."),
    errors=(*BODY, ArchiveBusy, *WRITE, *PAYLOADS, Unsupported),
    body=ArchiveSessions,
    example={"to": "s3://bucket/run-7", "older_than_s": 604800},
)
async def archive_sessions(request: Request) -> dict[str, Any]:
    """Move some rollouts into one Parquet file: closed, rewarded, in no checkpoint, and those of a group
    acknowledged by the training feed; with `run`, `group_id`, `group_prefix` or `metadata` only those that fit. Repeat
    with `after` of the reply until it is null; turns go on meanwhile."""
    given = await request.body_of(ArchiveSessions)
    after = None if given.after is None else Place(given.after.closed_at, given.after.session_id)
    return {**await _archive(request).step(given.older_than_s, given.to, given.limit, after, given)}


@route(
    "POST /archives/import",
    "Bring the sessions of an archive back",
    "admin",
    json_reply(
        ImportedFile, "How many sessions were written, how many were already in the database, and which were refused."
    ),
    errors=(*BODY, NotFound, ArchiveBusy, *WRITE, *PAYLOADS, Unsupported),
    body=ImportFile,
    example={"file": "s3://bucket/run-7/turnlog-1-5d41402abc4b2a76.parquet"},
)
async def import_file(request: Request) -> dict[str, Any]:
    """Write the sessions of a file with their numbers, rewards and payloads. Their events stand at the end of the
    order of commits. No group is offered in the training feed again. Repeat it after a crash. A session is refused
    where this is not the file that it is archived in, or where the file is damaged there."""
    given = await request.body_of(ImportFile)
    with request.services.inflight.reserve(peer=request.head.peer) as memory:
        return {**await _archive(request).bring_back(given.file, memory)}


def _archive(request: Request) -> Archive:
    archive: Archive = request.services.features["archive"]
    return archive
