"""`GET /events`: the events of all sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.types import Receive, Scope, Send

from app.api.closed_stream import ClosedStream, FollowedStream
from app.api.describe import NDJSON, READ, Reply, describe
from app.api.disconnect import while_connected
from app.api.limits import connection_of
from app.api.parameters import require_known
from app.api.state import services
from app.domain.events import TYPES
from app.domain.patterns import ID, MAX_INTEGER, NO_NUL
from app.errors import InvalidRequest, Overloaded, PositionGone
from app.sessions.all_events import AllEvents, EventQuery
from app.store.feed import EventFilter
from app.tasks import cancelled
from turnlog import replies as reply_types

router = APIRouter(tags=["Sessions"])

UNREAD_S = 2.0
"""How long a stopping server waits for a client that does not read what was sent to it."""


class EventParameters(BaseModel):
    """Which events to give (None: any), and from where."""

    model_config = ConfigDict(frozen=True)

    after: str | None = Field(
        default=None, description="Only events after this `position`; `end`: only events from now on."
    )
    follow: bool = Field(default=False, description="Keep the stream open and send new events.")
    limit: int | None = Field(default=None, ge=1, le=MAX_INTEGER, description="Maximum number of events.")
    type: list[str] = Field(default=[], description="Only events of these types, repeated or separated by commas.")
    session_id: str | None = Field(default=None, pattern=ID, description="Only events of this session.")
    group_id: str | None = Field(
        default=None, pattern=NO_NUL, description="Only events of this group's sessions, agents included."
    )

    name: str | None = Field(default=None, pattern=ID, description="Only events of the sessions that clients call so.")
    generation: int | None = Field(default=None, ge=1, le=2**31 - 1, description="Only this generation of a name.")

    @field_validator("type", mode="after")
    @classmethod
    def _known(cls, given: list[str]) -> list[str]:
        named = [name.strip() for one in given for name in one.split(",")]
        for name in named:
            if name not in TYPES:
                raise ValueError(f"{name:.64} is no type of events; there are {', '.join(sorted(TYPES))}")
        return named


@router.get("/events")
@describe(
    "The events of all sessions, in the order of commits",
    "page",
    Reply("Events, and positions.", {NDJSON: reply_types.LogLine}),
    errors=(InvalidRequest, PositionGone, Overloaded, *READ),
)
async def get_events(request: Request, query: Annotated[EventParameters, Query()]) -> StreamingResponse:
    """Every session's events as NDJSON, in the order of commits; with `follow` the stream stays open.

    Each line has its `position`, with which any process goes on behind it.
    """
    require_known(request, EventParameters)
    feed = services(request).all_events
    wanted = EventFilter(tuple(query.type), query.session_id, query.group_id, query.name, query.generation)
    asked = EventQuery(query.after, query.follow, query.limit, wanted)
    lines = await while_connected(request.receive, feed.start(asked))
    return _AllFollowed(lines, feed) if query.follow else ClosedStream(lines, NDJSON)


class _AllFollowed(FollowedStream):
    """Ends with the server, also if the client does not read."""

    def __init__(self, pieces: AsyncGenerator[bytes], feed: AllEvents) -> None:
        super().__init__(pieces, NDJSON)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        dropping = asyncio.create_task(self._drop(scope), name="turnlog-drop-unread")
        try:
            await super().__call__(scope, receive, send)
        finally:
            await cancelled(dropping)

    async def _drop(self, scope: Scope) -> None:
        await self._feed.stopping.wait()
        await asyncio.sleep(UNREAD_S)
        connection = connection_of(scope)
        if connection is not None:
            connection.drop()
