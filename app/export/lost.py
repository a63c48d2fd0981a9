"""Counts the sampled tokens of a session that a trainer does not get, each under one reason.

A session's own sampled tokens are those of all turns in its log, without those that a fork copied as context. Each is
in the loss of a row, or it is lost: sampled = trained + lost. Where `loss=every` has a token in several rows, it is
lost with the last of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from app.domain.branches import BranchRow
from app.domain.events import Event, SessionCreated, TurnCommitted
from app.domain.samples import Segment
from app.export.rows import Known, SessionRows, counted

IsStale = Callable[[str], bool]
"""Do tokens of this weight version leave the loss?"""

SHORTENED = (("max_seq_len", "are cut"), ("trimmed", "are not in the next prompt"), ("stale", "are masked"))
"""What takes a part of a row's tokens, in the order in which it is counted."""


class Missing(NamedTuple):
    """What of a session is not in an export: from turn `turn` on, or that turn; so many sampled tokens."""

    segment: int
    turn: int
    reason: str
    lost_tokens: int | None


class _Kept(NamedTuple):
    """How many of a turn's sampled tokens a row has in its loss: those that fit, without what the next prompt trims,
    without stale ones."""

    fitting: int
    repeated: int
    fresh: int


def sampled_tokens(session: Known) -> dict[int, int]:
    """The session's own sampled tokens, by turn."""
    context = session.session.context_turns
    return {turn: counted(event).output_tokens for turn, event in session.events.items() if turn > context}


def sampled_in(log: Iterable[Event]) -> int:
    """The sum of these, of a log that has at least the SessionCreated and TurnCommitted events."""
    context = tokens = 0
    for event in log:
        if isinstance(event, SessionCreated):
            context = 0 if event.fork is None else event.fork.context_turns
        elif isinstance(event, TurnCommitted) and event.turn > context:
            tokens += counted(event).output_tokens
    return tokens


class Ledger:
    """Which of a session's sampled tokens are in whose loss. `is_stale`: None where no token is masked for its age."""

    def __init__(self, session: Known, made: SessionRows, is_stale: IsStale | None) -> None:
        self.sampled = sampled_tokens(session)
        self._kept = {one.row.leaf.number: _kept(one, is_stale) for one in made.segments}
        self._best = dict.fromkeys(self.sampled, _Kept(0, 0, 0))
        self._holders: dict[int, Counter[int]] = {}  # how many rows have so many of a turn's tokens in their loss
        self._held: dict[int, list[int]] = {}  # by row, the turns that no earlier row has in its loss
        seen = set[int]()
        for row in made.rows:
            self._held[row.leaf.number] = sorted(row.in_loss - seen)
            seen |= row.in_loss
            for turn, kept in self._kept.get(row.leaf.number, {}).items():
                self._best[turn] = _Kept(*map(max, kept, self._best[turn]))
                self._holders.setdefault(turn, Counter())[kept.fresh] += 1
        self._given: dict[int, BranchRow] = {}
        self._told = 0

    def shortened(self, row: BranchRow) -> Iterator[Missing]:
        """What takes a part of a row of which something fits."""
        own = {turn: (self.sampled[turn], *self._best[turn]) for turn in self._held[row.leaf.number]}
        total = sum(sampled for sampled, *_ in own.values())
        for place, (reason, how) in enumerate(SHORTENED):
            lost = {turn: some[place] - some[place + 1] for turn, some in own.items() if some[place] > some[place + 1]}
            if lost:
                tokens = sum(lost.values())
                told = f"{reason}: {tokens} of {total} sampled tokens {how}"
                yield Missing(row.leaf.segment, min(lost), told, tokens)

    def give(self, row: BranchRow) -> None:
        self._given[row.leaf.number] = row

    def lose(self, row: BranchRow) -> int:
        """The tokens that are in no loss without this row, which is left out. Of one of which nothing fits: all."""
        self._given.pop(row.leaf.number, None)
        fitting = self._kept.get(row.leaf.number)
        lost = 0 if fitting is not None else sum(self.sampled[turn] for turn in self._held[row.leaf.number])
        for turn, kept in (fitting or {}).items():
            holders = self._holders[turn]
            holders[kept.fresh] -= 1
            if not holders[kept.fresh]:
                del holders[kept.fresh]
                lost += max(kept.fresh - max(holders, default=0), 0)
        self._told += lost
        return lost

    def rest(self) -> int:
        """What is neither in a row that was given nor told as lost, where a session ends in the middle."""
        trained: dict[int, int] = {}
        for number in self._given:
            for turn, kept in self._kept[number].items():
                trained[turn] = max(kept.fresh, trained.get(turn, 0))
        return sum(self.sampled.values()) - self._told - sum(trained.values())


def _kept(segment: Segment, is_stale: IsStale | None) -> dict[int, _Kept]:
    """By turn, of those that a row has in its loss and that fit at least in part."""
    kept: dict[int, _Kept] = {}
    bases = [*(after.base_tokens for after in segment.turns[1:]), math.inf]
    for event, base in zip(segment.turns, bases, strict=True):
        if event.turn not in segment.row.in_loss:
            continue
        start, length = event.base_tokens + event.suffix_tokens, counted(event).output_tokens
        end = segment.end if segment.end is not None and base == math.inf else math.inf
        fitting = int(min(length, end - start))
        repeated = int(min(fitting, base - start))
        spans = event.weight_versions if is_stale is not None else ()
        stale = sum(
            max(min(span.end, repeated) - span.start, 0) for span in spans if is_stale and is_stale(span.version)
        )
        kept[event.turn] = _Kept(fitting, repeated, repeated - stale)
    return kept
