"""What turns add up to over time: a session's sums, kept in memory as long as there is room, and continued by what is
new in its log.

Nothing here is a truth: whatever is dropped is read from the log again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from app.domain.events import Recorded, TurnAbandoned, TurnCommitted, TurnRejected, UnknownEvent, is_number
from app.sessions.session_list import SessionRow
from app.store import reads
from app.store.reads import EventRow

By = Literal["minute", "hour", "day", "weight_version"]

SECONDS = {"minute": 60, "hour": 3600, "day": 86_400}

MAX_KINDS = 100
"""Kinds of errors, and engines, of one bucket."""

MAX_BUCKETS = 20_000
"""Buckets in memory, about 1 KB each, of the sessions that were asked for last."""

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

    def add_session(self, row: SessionRow, turns: SessionSums) -> None:
        self.sessions += 1
        self.session_turns += row.turns
        self.session_sampled += turns.sampled
        self.session_tokens += turns.tokens
        if row.reward is None:
            return
        self.rewarded += 1
        self.reward_sum += row.reward
        self.reward_squares += row.reward**2
        self.reward_min = row.reward if self.reward_min is None else min(self.reward_min, row.reward)
        self.reward_max = row.reward if self.reward_max is None else max(self.reward_max, row.reward)

    def add_turn(self, event: TurnCommitted, version: int | None) -> None:
        self.committed += 1
        if version is not None:
            self.versions += 1
            self.version_sum += version
            self.version_max = max(version, self.version_max or version)
        if event.timing is not None:
            milliseconds = event.timing.engine / 1000
            place = bin_of(milliseconds)
            self.latency[place] = self.latency.get(place, 0) + 1
            self._add_engine(event.engine, 1, milliseconds)

    def add_error(self, reason: str, count: int = 1) -> None:
        if reason in self.errors or len(self.errors) < MAX_KINDS:
            self.errors[reason] = self.errors.get(reason, 0) + count

    def add_turns_of(self, other: Bucket) -> None:
        """What `add_turn` and `add_error` have added to the other."""
        self.committed += other.committed
        self.versions += other.versions
        self.version_sum += other.version_sum
        if other.version_max is not None:
            self.version_max = max(other.version_max, self.version_max or other.version_max)
        for place, count in other.latency.items():
            self.latency[place] = self.latency.get(place, 0) + count
        for engine, (count, milliseconds) in other.engines.items():
            self._add_engine(engine, count, milliseconds)
        for reason, count in other.errors.items():
            self.add_error(reason, count)

    def _add_engine(self, engine: str, count: int, milliseconds: float) -> None:
        if engine in self.engines or len(self.engines) < MAX_KINDS:
            known, total = self.engines.get(engine, (0, 0.0))
            self.engines[engine] = (known + count, total + milliseconds)


class SessionSums:
    """The sums of one session's turns up to event `version`. Not changed any more once others can see it.

    `errors` are those that belong to the session's weight version, which may still change. `damaged` events could not
    be read.
    """

    def __init__(self, by: By, before: SessionSums | None = None) -> None:
        self._seconds = SECONDS.get(by)
        self.version, self.updated_at = 0, 0.0
        self.sampled, self.tokens, self.damaged = 0, 0, 0
        self.buckets: dict[int | None, Bucket] = {}
        self.errors: dict[str, int] = {}
        if before is not None:
            self.sampled, self.tokens = before.sampled, before.tokens
            self.errors = dict(before.errors)
            for key, bucket in before.buckets.items():
                self.buckets[key] = Bucket(key)
                self.buckets[key].add_turns_of(bucket)

    def add(self, row: SessionRow, ends: Iterable[EventRow]) -> None:
        """Go on up to the row's version. Later events are left for the next time."""
        self.version, self.updated_at = row.version, row.updated_at
        for stored in ends:
            try:
                (recorded,) = reads.decode_events([stored])
            except UnknownEvent:
                self.damaged += 1
                continue
            if recorded.seq <= row.version:
                self._add(recorded)

    def _add(self, recorded: Recorded) -> None:
        event = recorded.event
        if isinstance(event, TurnCommitted):
            self.sampled += event.output_tokens
            self.tokens += event.suffix_tokens + event.output_tokens
            known = [int(span.version) for span in event.weight_versions if is_number(span.version)]
            version = known[-1] if known else None
            self._bucket(recorded.at, version).add_turn(event, version)
        elif isinstance(event, TurnRejected | TurnAbandoned) and self._seconds is not None:
            self._bucket(recorded.at, None).add_error(event.reason)
        elif isinstance(event, TurnRejected | TurnAbandoned):
            self.errors[event.reason] = self.errors.get(event.reason, 0) + 1

    def _bucket(self, at: float, version: int | None) -> Bucket:
        key = key_of(self._seconds, at, version)
        return self.buckets.setdefault(key, Bucket(key))


class TrendCache:
    """The sums of the sessions that were asked for last."""

    def __init__(self, most: int = MAX_BUCKETS) -> None:
        self._most = most
        self._held = 0
        self._sums: OrderedDict[tuple[str, By], SessionSums] = OrderedDict()

    def get(self, row: SessionRow, by: By) -> SessionSums | None:
        """The session's sums, as far as they are known; None if they must be read from the first event on.

        They are the row's own if they have its version.
        """
        found = self._sums.get((row.session_id, by))
        if found is None or found.version > row.version:
            return None  # a crash of the database has undone events
        if found.version == row.version and found.updated_at != row.updated_at:
            return None
        self._sums.move_to_end((row.session_id, by))
        return found

    def put(self, session_id: str, by: By, sums: SessionSums) -> None:
        if sums.damaged:
            return
        old = self._sums.pop((session_id, by), None)
        self._held += _size(sums) - (_size(old) if old else 0)
        self._sums[session_id, by] = sums
        while self._held > self._most:
            _, dropped = self._sums.popitem(last=False)
            self._held -= _size(dropped)


def added_up(by: By, sessions: Sequence[tuple[SessionRow, SessionSums]]) -> list[Bucket]:
    """The sums of all of them, ordered by key."""
    seconds = SECONDS.get(by)
    buckets: dict[int | None, Bucket] = {}
    for row, sums in sessions:
        key = key_of(seconds, row.created_at, row.weight_version)
        own = buckets.setdefault(key, Bucket(key))
        own.add_session(row, sums)
        for reason, count in sums.errors.items():
            own.add_error(reason, count)
        for key, bucket in sums.buckets.items():
            buckets.setdefault(key, Bucket(key)).add_turns_of(bucket)
    return [buckets[key] for key in sorted(buckets, key=lambda key: (key is None, key or 0))]


def key_of(seconds: int | None, at: float, version: int | None) -> int | None:
    """The bucket of a time, or with None of a version."""
    return version if seconds is None else int(at // seconds) * seconds


def bin_of(milliseconds: float) -> int:
    """The bin of a latency."""
    if milliseconds <= FIRST_MS:
        return 0
    return min(BINS - 1, math.ceil(math.log2(milliseconds / FIRST_MS) * BINS_PER_DOUBLING))


def _size(sums: SessionSums) -> int:
    return 1 + len(sums.buckets)
