"""`GET /export` and `GET /events`: training rows, and the events of all sessions, in the order of commits."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import ConfigDict, Field, field_validator
from starlette.responses import StreamingResponse

from app.api.parameters import Cursor
from app.api.replies import ClosedStream, FollowedStream
from app.api.requests import Request
from app.api.routes import ANYTHING, BINARY, BYTES, NDJSON, PAYLOADS, READ, Reply, Routes
from app.domain.events import TYPES
from app.domain.patterns import ID, MAX_INTEGER
from app.domain.selection import Selection
from app.errors import InvalidRequest, Overloaded, PositionGone, Unsupported
from app.export.query import ExportQuery
from app.sessions.all_events import EventQuery
from app.store.feed import EventFilter
from turnlog import replies as reply_types

route, event_route = Routes("Export"), Routes("Sessions")

ROWS = Reply(
    "Rows, in the media type of the format.",
    {NDJSON: ANYTHING, "application/vnd.apache.parquet": BINARY, BYTES: BINARY, "application/vnd.msgpack": BINARY},
    ("x-turnlog-cursor", "x-turnlog-next-cursor", "x-turnlog-empty", "content-disposition"),
)


class ExportParameters(ExportQuery):
    """The parameters of an export, with the cursor at which it continues."""

    model_config = ConfigDict(extra="forbid")

    cursor: Cursor = None


@route(
    "GET /export",
    "Export training rows",
    "page",
    ROWS,
    errors=(InvalidRequest, Unsupported, *READ, *PAYLOADS),
    of_run="query",
)
async def export(request: Request, query: Annotated[ExportParameters, Query()]) -> StreamingResponse:
    """Training rows in the order of commit, in any format and shape.

    `x-turnlog-cursor` repeats this export. Each row's `cursor` continues after that row, and `x-turnlog-next-cursor`
    after the last row; with a `limit` that header is only sent when no rows are left. `x-turnlog-empty` says that there
    is no row.
    """
    started = await request.while_connected(request.services.exporter.start(query, query.cursor))
    headers = {
        "x-turnlog-cursor": started.cursor,
        "content-disposition": f'attachment; filename="turnlog{started.suffix}"',
    }
    if started.is_empty:
        headers["x-turnlog-empty"] = "true"
    if query.limit is None or started.is_empty:
        headers["x-turnlog-next-cursor"] = started.next_cursor
    return ClosedStream(started.pieces, started.media_type, headers)


class EventParameters(Selection):
    """Which events to give (None: any), and from where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    after: str | None = Field(
        default=None, description="Only events after this `position`; `end`: only events from now on."
    )
    follow: bool = Field(default=False, description="Keep the stream open and send new events.")
    limit: int | None = Field(default=None, ge=1, le=MAX_INTEGER, description="Maximum number of events.")
    type: list[str] = Field(default=[], description="Only events of these types, repeated or separated by commas.")
    session_id: str | None = Field(default=None, pattern=ID, description="Only events of this session.")
    name: str | None = Field(default=None, pattern=ID, description="Only events of sessions with this name.")
    generation: int | None = Field(default=None, ge=1, le=2**31 - 1, description="Only this generation of the name.")

    @field_validator("type", mode="after")
    @classmethod
    def _known(cls, given: list[str]) -> list[str]:
        named = [name.strip() for one in given for name in one.split(",")]
        for name in named:
            if name not in TYPES:
                raise ValueError(f"{name:.64} is not a type of event; the types are {', '.join(sorted(TYPES))}")
        return named


@event_route(
    "GET /events",
    "The events of all sessions, in the order of commits",
    "page",
    Reply("Events and positions.", {NDJSON: reply_types.LogLine}),
    errors=(InvalidRequest, PositionGone, Overloaded, *READ),
    of_run="query",
)
async def get_events(request: Request, query: Annotated[EventParameters, Query()]) -> StreamingResponse:
    """Every session's events as NDJSON, in the order of commits; with `follow` the stream stays open.

    Each line has its `position`, from which any process can continue.
    """
    feed = request.services.all_events
    wanted = EventFilter(tuple(query.type), query.session_id, query.name, query.generation, **query.run_and_group)
    asked = EventQuery(query.after, query.follow, query.limit, wanted, query.metadata)
    lines = await request.while_connected(feed.start(asked))
    return FollowedStream(request, lines) if query.follow else ClosedStream(lines, NDJSON)
