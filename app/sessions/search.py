"""Answers searches from the index."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from app.domain import cursors, notes
from app.domain.patterns import MAX_INTEGER
from app.domain.search_query import Query, parse, snippet
from app.errors import InvalidRequest
from app.sessions.log_end import LogEnd
from app.sessions.log_position import decode_position
from app.sessions.session_filter import NewestVersion, SessionConditions
from app.store.ports import Database
from app.store.reads import Connection, Position
from app.store.search import reading, writing
from app.store.search.reading import EntryFilter, Found
from app.store.search.writing import IndexState


class Hit(msgspec.Struct, frozen=True):
    """A message that matches. `message` counts from 0 in the conversation that ends with the turn's reply; null for a
    refused reply. `reason`: why the turn is in no row. `marks` are [start, end) of what matches in `snippet`, in
    Unicode characters."""

    session_id: str
    turn: int
    message: int | None
    role: str
    tools: Sequence[str]
    finish_reason: str | None
    reason: str | None
    at: float
    status: str
    group_id: str | None
    snippet: str
    marks: Sequence[Sequence[int]]


class SearchPage(msgspec.Struct, frozen=True):
    """`is_current`: the index has all that was committed before the search began."""

    hits: Sequence[Hit]
    next_cursor: str | None
    is_current: bool


class Search:
    """Searches of this process."""

    def __init__(self, database: Database, log_end: LogEnd, newest_version: NewestVersion) -> None:
        self._database = database
        self._log_end = log_end
        self._newest_version = newest_version

    async def page(
        self, q: str | None, wanted: EntryFilter, of: SessionConditions, cursor: str | None, limit: int
    ) -> SearchPage:
        """Raises InvalidRequest for a query without a word, or for nothing to search for, StoreUnavailable."""
        query = None if q is None else parse(q)
        if query is None and wanted == EntryFilter():
            raise InvalidRequest("q, role, tool, finish_reason, reason, session_id or metadata must be given")
        before = reading.FIRST if cursor is None else _place(cursor)

        end = await self._log_end.present()

        def read(connection: Connection) -> tuple[list[Found], IndexState]:
            state = writing.state(connection)
            if not _is_whole(state):
                return [], state
            newest = None if of.min_staleness is None else self._newest_version(connection)
            return reading.find(connection, query, wanted, of.of_heads(newest), before, limit + 1), state

        found, state = await self._database.read(read)
        return SearchPage(
            hits=[_hit(one, query) for one in found[:limit]],
            next_cursor=cursors.encode(found[limit - 1].id) if len(found) > limit else None,
            is_current=_has(state, end),
        )


def _is_whole(state: IndexState) -> bool:
    """Not while the index is being cleared, or is an earlier version's: it lacks tables, or columns."""
    return state.position is not None and state.version == writing.INDEX_VERSION


def _has(state: IndexState, end: Position) -> bool:
    """Has the index come to this end of the log?"""
    if state.position is None or not _is_whole(state):
        return False
    position = decode_position(state.position, "the search index")
    return position.place >= end


def _place(cursor: str) -> int:
    """Raises InvalidRequest."""
    place: int = cursors.decode(cursor, int, "this search")
    if not 0 <= place <= MAX_INTEGER:
        raise InvalidRequest("cursor is not one of this search")
    return place


def _hit(found: Found, query: Query | None) -> Hit:
    part = snippet(found.text, query)
    return Hit(
        session_id=found.session_id,
        turn=found.turn,
        message=found.message,
        role=found.role,
        tools=notes.parted(found.tools),
        finish_reason=found.finish_reason,
        reason=found.reason,
        at=found.at,
        status=found.status,
        group_id=found.group_id,
        snippet=part.text,
        marks=part.marks,
    )
