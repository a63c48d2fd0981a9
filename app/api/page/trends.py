"""Sums over time for the page's charts: a few sessions a request, from their heads and their logs; nothing is stored.

A browser adds the sums of several requests up, so each is something that can be added: counts, totals, histograms.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from app.domain.events import TurnAbandoned, TurnCommitted, TurnRejected, UnknownEvent, is_number
from app.sessions.session_list import SessionList, SessionQuery, SessionRow
from app.store import reads, trend_reads
from app.store.engine import Database
from app.store.trend_reads import EndRow

By = Literal["minute", "hour", "day", "weight_version"]

SECONDS = {"minute": 60, "hour": 3600, "day": 86_400}

SESSIONS = 100
"""Sessions of one request."""

MAX_EVENTS = 20_000
"""Turns that one request looks at; where there are more, `is_cut` says that some are missing."""

MAX_KINDS = 100
"""Kinds of errors, and engines, of one bucket."""

BINS_PER_DOUBLING = 4
FIRST_MS = 1.0
BINS = 96
"""Bin n of a histogram of latencies ends at FIRST_MS * 2 ** (n / BINS_PER_DOUBLING); the last has everything above."""


class Bucket(msgspec.Struct):
    """Sums of one interval, which begins at `key` in seconds since the epoch, or of the weight version `key`.

    Of the sessions created in it: `sessions`, `rewarded`, their rewards' sum, sum of squares, least and largest, their
    turns and tokens. Of the turns that ended in it: `committed`, `versions` with the sum and the largest of the numeric
    weight versions, the engine's `latency` as a histogram, count and milliseconds by engine, `errors` by kind.
    """

    key: int | None
    sessions: int = 0
    rewarded: int = 0
    reward_sum: float = 0.0
    reward_squares: float = 0.0
    reward_min: float | None = None
    reward_max: float | None = None
    session_turns: int = 0
    session_sampled: int = 0
    session_tokens: int = 0
    committed: int = 0
    versions: int = 0
    version_sum: int = 0
    version_max: int | None = None
    latency: dict[int, int] = msgspec.field(default_factory=dict)
    engines: dict[str, tuple[int, float]] = msgspec.field(default_factory=dict)
    errors: dict[str, int] = msgspec.field(default_factory=dict)


class TrendPage(msgspec.Struct, frozen=True):
    """Sums of the next `scanned` of `total` sessions, newest first; `cursor` continues, null: these were the last.

    `damaged` counts events, or sessions, that could not be read. `is_cut`: there were too many turns for one request.
    """

    buckets: Sequence[Bucket]
    scanned: int
    total: int
    total_is_exact: bool
    damaged: int
    is_cut: bool
    cursor: str | None


class Trends:
    def __init__(self, database: Database, sessions: SessionList) -> None:
        self._database = database
        self._sessions = sessions

    async def page(self, query: SessionQuery, by: By, cursor: str | None) -> TrendPage:
        """Raises InvalidRequest for an invalid cursor, StoreUnavailable."""
        newest_first = query.model_copy(update={"sort": "created_at", "order": "desc"})
        found = await self._sessions.page(newest_first, cursor, SESSIONS)
        ids = [row.session_id for row in found.sessions]
        ends = await self._database.read(lambda c: trend_reads.turn_ends(c, ids, MAX_EVENTS), or_else=lambda _: None)
        sums = _Sums(by)
        if ends is None:
            sums.damaged = len(ids)
        await asyncio.to_thread(sums.add, found.sessions, ends or [])
        return TrendPage(
            buckets=[sums.buckets[key] for key in sorted(sums.buckets, key=lambda key: (key is None, key or 0))],
            scanned=len(ids),
            total=found.total,
            total_is_exact=found.total_is_exact,
            damaged=sums.damaged,
            is_cut=ends is not None and len(ends) >= MAX_EVENTS,
            cursor=found.next_cursor,
        )


class _Sums:
    def __init__(self, by: By) -> None:
        self._seconds = SECONDS.get(by)
        self.buckets: dict[int | None, Bucket] = {}
        self.damaged = 0

    def add(self, rows: Sequence[SessionRow], ends: Iterable[EndRow]) -> None:
        heads = {row.session_id: row for row in rows}
        for row in rows:
            self._add_session(row)
        for session_id, stored in ends:
            try:
                (recorded,) = reads.decode_events([stored])
            except UnknownEvent:
                self.damaged += 1
                continue
            event = recorded.event
            if isinstance(event, TurnCommitted):
                self._add_turn(heads[session_id], recorded.at, event)
            elif isinstance(event, TurnRejected | TurnAbandoned):
                bucket = self._bucket(recorded.at, heads[session_id].weight_version)
                if event.reason in bucket.errors or len(bucket.errors) < MAX_KINDS:
                    bucket.errors[event.reason] = bucket.errors.get(event.reason, 0) + 1

    def _bucket(self, at: float, version: int | None) -> Bucket:
        key = version if self._seconds is None else int(at // self._seconds) * self._seconds
        return self.buckets.setdefault(key, Bucket(key))

    def _session_bucket(self, row: SessionRow) -> Bucket:
        return self._bucket(row.created_at, row.weight_version)

    def _add_session(self, row: SessionRow) -> None:
        bucket = self._session_bucket(row)
        bucket.sessions += 1
        bucket.session_turns += row.turns
        if row.reward is None:
            return
        bucket.rewarded += 1
        bucket.reward_sum += row.reward
        bucket.reward_squares += row.reward**2
        bucket.reward_min = row.reward if bucket.reward_min is None else min(bucket.reward_min, row.reward)
        bucket.reward_max = row.reward if bucket.reward_max is None else max(bucket.reward_max, row.reward)

    def _add_turn(self, row: SessionRow, at: float, event: TurnCommitted) -> None:
        own = self._session_bucket(row)
        own.session_sampled += event.output_tokens
        own.session_tokens += event.suffix_tokens + event.output_tokens
        known = [int(span.version) for span in event.weight_versions if is_number(span.version)]
        bucket = self._bucket(at, known[-1] if known else None)
        bucket.committed += 1
        if known:
            bucket.versions += 1
            bucket.version_sum += known[-1]
            bucket.version_max = max(known[-1], bucket.version_max or known[-1])
        if event.timing is not None:
            milliseconds = event.timing.engine / 1000
            place = bin_of(milliseconds)
            bucket.latency[place] = bucket.latency.get(place, 0) + 1
            if event.engine in bucket.engines or len(bucket.engines) < MAX_KINDS:
                count, total = bucket.engines.get(event.engine, (0, 0.0))
                bucket.engines[event.engine] = (count + 1, total + milliseconds)


def bin_of(milliseconds: float) -> int:
    """The bin of a latency."""
    if milliseconds <= FIRST_MS:
        return 0
    return min(BINS - 1, math.ceil(math.log2(milliseconds / FIRST_MS) * BINS_PER_DOUBLING))
