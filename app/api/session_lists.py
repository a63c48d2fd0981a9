"""Lists of sessions and of groups, and a session's state after any of its events."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from app.api.describe import JSON, PAYLOADS, READ, describe, json_reply
from app.api.parameters import LIMIT, PageCursor, SessionId, require_known
from app.api.state import services
from app.domain import cursors
from app.domain.patterns import ID, MAX_INTEGER
from app.errors import InvalidRequest, SessionNotFound, SessionUnreadable
from app.sessions.session_list import SessionFilter, SessionQuery, SessionRow, State
from turnlog import replies as wire

router = APIRouter(tags=["Sessions"])

_CreationPlace = tuple[float, Annotated[str, msgspec.Meta(pattern=ID)]]
"""Where a page ends that is sorted by creation, newest first: the last session's time of creation and id."""


class SessionListQuery(SessionFilter):
    """Which sessions to list, in which order, from where."""

    prefix: str | None = Field(default=None, pattern=ID, description="Only sessions whose id begins so.")
    count: bool = Field(default=False, description="Also count the matches, up to 100,000: `total`.")
    limit: int = Field(default=100, ge=1, le=1000, description=LIMIT)
    cursor: PageCursor = None


class ListedSession(msgspec.Struct, frozen=True):
    """A session in a list. `version` is its last event, times are seconds since the epoch.

    `state` is `status`, or what an open session is doing: `claimed`: a turn is in flight, since `claimed_since`;
    `gated`: it waits at a gate; else `idle`. `staleness`: how many weight versions its newest turn is behind the
    newest one.
    """

    session_id: str
    version: int
    status: str
    turns: int
    group_id: str | None
    reward: float | None
    created_at: float
    updated_at: float
    state: State
    attempt: int | None
    weight_version: int | None
    staleness: int | None
    engine: str | None
    claimed_since: float | None
    closed_at: float | None
    note: str | None
    tags: list[str]


class SessionPage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A page; both totals only with `count`."""

    sessions: list[ListedSession]
    next_cursor: str | None
    total: int | msgspec.UnsetType = msgspec.UNSET
    total_is_exact: bool | msgspec.UnsetType = msgspec.UNSET


@router.get("/sessions")
@describe(
    "List sessions, newest first",
    "page",
    json_reply(wire.SessionPage, "One page of sessions."),
    errors=(InvalidRequest, *READ, *PAYLOADS),
)
async def list_sessions(request: Request, query: Annotated[SessionListQuery, Query()]) -> Response:
    """Sessions, newest first, or sorted by another column; filtered, and paged by cursor.

    `claimed_since` lists only sessions with a turn in flight.
    """
    require_known(request, SessionListQuery)
    is_default = (query.sort, query.order) == ("created_at", "desc")
    filters = query.model_dump(include=set(SessionFilter.model_fields))
    wanted = SessionQuery(**filters, q=query.prefix)
    cursor = _inner(query.cursor) if is_default and query.cursor is not None else query.cursor
    found = await services(request).session_list.page(wanted, cursor, query.limit, counted=query.count)
    rows = [_listed(row) for row in found.sessions]
    more = found.next_cursor if not is_default or found.next_cursor is None else _outer(found.next_cursor)
    page = SessionPage(rows, more)
    if query.count:
        page = SessionPage(rows, more, found.total, found.total_is_exact)
    return Response(msgspec.json.encode(page), media_type=JSON)


def _listed(row: SessionRow) -> ListedSession:
    is_open = row.state in ("idle", "claimed", "gated")
    known: dict[str, Any] = msgspec.structs.asdict(row)
    return ListedSession(status="open" if is_open else row.state, **known)


def _inner(cursor: str) -> str:
    """The list's own cursor for one of `GET /sessions` in its default order. Raises InvalidRequest."""
    created_at, session_id = cursors.decode(cursor, _CreationPlace, "this list")
    return cursors.encode(("created_at", True, created_at, session_id))


def _outer(cursor: str) -> str:
    """The other way: cursors in the default order are as they have always been."""
    _, _, created_at, session_id = cursors.decode(cursor, tuple[str, bool, float, str], "this list")
    return cursors.encode((created_at, session_id))


@router.get("/groups")
@describe(
    "List groups, ordered by id",
    "page",
    json_reply(wire.GroupPage, "One page of groups."),
    errors=(InvalidRequest, *READ),
)
async def list_groups(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000, description=LIMIT)] = 100,
    cursor: PageCursor = None,
) -> Response:
    """Groups with their progress, the statistics of their rewards and their place in the training feed, by id."""
    return Response(msgspec.json.encode(await services(request).group_list.page(cursor, limit)), media_type=JSON)


@router.get("/sessions/{session_id}/state")
@describe(
    "The session's state after any of its events",
    "session",
    json_reply(wire.State, "The state."),
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
    views = services(request).page.views
    return Response(msgspec.json.encode(await views.at(session_id, seq)), media_type=JSON)
