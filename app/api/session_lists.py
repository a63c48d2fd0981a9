"""Lists of sessions, and a session's state after any of its events."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from app.api.describe import JSON, PAYLOADS, READ, describe, json_reply
from app.api.parameters import LIMIT, PageCursor, SessionId, require_known
from app.api.state import services
from app.domain.patterns import ID, MAX_INTEGER
from app.errors import InvalidRequest, SessionNotFound, SessionUnreadable
from app.sessions.session_list import SessionFilter, SessionQuery
from turnlog import replies as reply_types

router = APIRouter(tags=["Sessions"])


class SessionListQuery(SessionFilter):
    """Which sessions to list, in which order, from where."""

    prefix: str | None = Field(default=None, pattern=ID, description="Only sessions whose id begins so.")
    count: bool = Field(default=False, description="Also count the matches, up to 100,000: `total`.")
    limit: int = Field(default=100, ge=1, le=1000, description=LIMIT)
    cursor: PageCursor = None


@router.get("/sessions")
@describe(
    "List sessions, newest first",
    "page",
    json_reply(reply_types.SessionPage, "One page of sessions."),
    errors=(InvalidRequest, *READ, *PAYLOADS),
)
async def list_sessions(request: Request, query: Annotated[SessionListQuery, Query()]) -> Response:
    """Sessions, newest first, or sorted by another column; filtered, and paged by cursor.

    `running_since` lists only sessions with a turn in flight.
    """
    require_known(request, SessionListQuery)
    filters = query.model_dump(include=set(SessionFilter.model_fields))
    wanted = SessionQuery(**filters, q=query.prefix)
    page = await services(request).session_list.page(wanted, query.cursor, query.limit, counted=query.count)
    return Response(msgspec.json.encode(page), media_type=JSON)


@router.get("/sessions/{session_id}/state")
@describe(
    "The session's state after any of its events",
    "session",
    json_reply(reply_types.State, "The state."),
    errors=(InvalidRequest, SessionNotFound, SessionUnreadable, *READ, *PAYLOADS),
)
async def get_state(
    request: Request,
    session_id: SessionId,
    seq: Annotated[
        int | None, Query(ge=1, le=MAX_INTEGER, description="The state after this event; default: the last.")
    ] = None,
) -> Response:
    """Turns with the times of their stages, failed turns, rollbacks, rewards and metadata; also of a closed or erased
    session."""
    views = services(request).views
    return Response(msgspec.json.encode(await views.at(session_id, seq)), media_type=JSON)
