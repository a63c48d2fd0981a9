"""Sums over time for the page's charts: some sessions a request, from their heads and their logs; nothing is stored.

A browser adds the sums of several requests up, so each is something that can be added: counts, totals, histograms. What
was read of a session stays in memory for a while, so that the next request reads only what is new.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from app.api.page.trend_sums import Bucket, By, SessionSums, TrendCache, added_up
from app.sessions.session_list import SessionList, SessionListPage, SessionQuery, SessionRow, beginning_of
from app.store import trend_reads
from app.store.engine import Database
from app.store.reads import EventRow

SESSIONS = 500
"""Sessions of one request, at most: fewer where they have many turns that were not read before."""

MAX_TURNS = 10_000
"""New turns that one request should read."""

MAX_EVENTS = 20_000
"""Turns that one request reads at most; where there are more, `is_cut` says that some are missing."""


class TrendPage(msgspec.Struct, frozen=True):
    """Sums of the next `scanned` of `total` sessions, newest first; `cursor` continues, null: these were the last.

    `total` is counted for the first page alone. `damaged` counts events, or sessions, that could not be read. `is_cut`:
    there were too many turns for one request.
    """

    buckets: Sequence[Bucket]
    scanned: int
    total: int | None
    total_is_exact: bool
    damaged: int
    is_cut: bool
    cursor: str | None


class Trends:
    """`max_turns`: the new turns that one request should read."""

    def __init__(self, database: Database, sessions: SessionList, max_turns: int = MAX_TURNS) -> None:
        self._database = database
        self._sessions = sessions
        self._max_turns = max_turns
        self._cache = TrendCache()

    async def page(self, query: SessionQuery, by: By, cursor: str | None) -> TrendPage:
        """Raises InvalidRequest for an invalid cursor, StoreUnavailable."""
        found = await self._listed(query, by, cursor)
        known = {row.session_id: self._cache.get(row, by) for row in found.sessions}
        read_upto = {session_id: before.version if before else 0 for session_id, before in known.items()}
        new = {row.session_id: seq for row in found.sessions if (seq := read_upto[row.session_id]) < row.version}
        ends = await self._database.read(lambda c: trend_reads.turn_ends(c, new, MAX_EVENTS), or_else=lambda _: None)
        is_cut = ends is not None and len(ends) >= MAX_EVENTS
        sums = await asyncio.to_thread(_sums, by, found.sessions, known, ends or [])
        if ends is not None and not is_cut:
            for session_id in new:
                self._cache.put(session_id, by, sums[session_id])
        buckets = await asyncio.to_thread(added_up, by, [(row, sums[row.session_id]) for row in found.sessions])
        return TrendPage(
            buckets=buckets,
            scanned=len(found.sessions),
            total=found.total if cursor is None else None,
            total_is_exact=found.total_is_exact,
            damaged=len(new) if ends is None else sum(one.damaged for one in sums.values()),
            is_cut=is_cut,
            cursor=found.next_cursor,
        )

    async def _listed(self, query: SessionQuery, by: By, cursor: str | None) -> SessionListPage:
        """The next sessions: as many as do not have more than `max_turns` new turns together, but one at least."""
        newest_first = query.model_copy(update={"sort": "created_at", "order": "desc"})
        found = await self._sessions.page(newest_first, cursor, SESSIONS, counted=cursor is None)
        totals = itertools.accumulate(self._new_turns(row, by) for row in found.sessions)
        fitting = max(1, sum(total <= self._max_turns for total in totals))
        return beginning_of(found, newest_first, fitting)

    def _new_turns(self, row: SessionRow, by: By) -> int:
        """About the turns that are not known yet."""
        known = self._cache.get(row, by)
        return row.turns if known is None else min(row.turns, row.version - known.version)


def _sums(
    by: By, rows: Sequence[SessionRow], known: Mapping[str, SessionSums | None], ends: Sequence[trend_reads.EndRow]
) -> dict[str, SessionSums]:
    """The sums of each session, with its new events."""
    new: dict[str, list[EventRow]] = {}
    for session_id, event in ends:
        new.setdefault(session_id, []).append(event)
    return {row.session_id: _continued(by, row, known[row.session_id], new.get(row.session_id, ())) for row in rows}


def _continued(by: By, row: SessionRow, known: SessionSums | None, ends: Sequence[EventRow]) -> SessionSums:
    if known is not None and known.version == row.version:
        return known
    sums = SessionSums(by, known)
    sums.add(row, ends)
    return sums
