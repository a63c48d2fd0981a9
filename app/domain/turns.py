"""The committed turns of a session: a tree of them, in the order in which they were committed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, takewhile

import msgspec

from app.domain.events import BranchCause, EngineShape, GivenIds, shape_of


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What later turns need to know of a committed one. `message_count` and `token_count` include its reply.

    `opened_seq` and `seq` are of its `TurnOpened` (0 for a copied turn, which has none) and its `TurnCommitted`, which
    process `incarnation` wrote at `committed_at`.
    """

    number: int
    parent: int
    segment: int
    base_messages: int
    message_count: int
    message_hashes: tuple[str, ...]
    client_hash: str
    base_tokens: int
    token_count: int
    tokens_hash: str
    tokens_text_bytes: int
    output_tokens: int
    finish_reason: str | None
    retry_key: str | None
    body_hash: str
    seq: int
    params: int
    tools: int | None
    protocol: str
    branch: int = 0
    branch_cause: BranchCause | None = None
    carries: int | None = None
    agent_id: str | None = None
    opened_seq: int = 0
    incarnation: int = 0
    committed_at: float = 0.0
    echo: int | None = None
    calls_hash: str | None = None
    bare_hash: str | None = None
    left_out: tuple[str, ...] = ()
    given_ids: GivenIds | None = None
    odd_ids: bool = False
    odd_arguments: bool = False

    @property
    def shape(self) -> EngineShape:
        return shape_of(self.protocol)

    @property
    def history_parent(self) -> int:
        """The turn whose messages it continues; 0 if it begins a conversation."""
        return self.parent if self.base_messages else 0

    @property
    def token_parent(self) -> int:
        """The turn whose tokens it continues; 0 if its prompt begins anew."""
        return self.parent if self.base_tokens else 0

    def supersedes(self, other: Turn) -> bool:
        """Is this, once it has a child, what a client got instead of `other`: the same request, sent once more?"""
        return (
            self.opened_seq > other.seq
            and self.body_hash == other.body_hash != ""
            and (self.history_parent, self.agent_id) == (other.history_parent, other.agent_id)
        )

    @property
    def input_hashes(self) -> tuple[str, ...]:
        """The hashes of the request's messages that are not its parent's."""
        return self.message_hashes[:-1]


class Turns:
    """Turns by number, iterated in the order of commits. Immutable: `added` returns another one.

    Successors share one list, so that a commit does not copy all turns before it. Each sees only its own first turns,
    of which there are `count`; a second successor of the same state copies. `newest` is the turn committed last.
    """

    __slots__ = ("_places", "_turns", "count", "newest")

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._turns = list(turns)
        self._places = {turn.number: place for place, turn in enumerate(self._turns)}
        self.count = len(self._turns)
        self.newest: Turn | None = self._turns[-1] if self._turns else None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Turn]:
        return islice(self._turns, self.count)

    def __reversed__(self) -> Iterator[Turn]:
        return (self._turns[place] for place in range(self.count - 1, -1, -1))

    def __contains__(self, number: object) -> bool:
        return self._places.get(number, self.count) < self.count  # type: ignore[call-overload, no-any-return]

    def __getitem__(self, number: int) -> Turn:
        place = self._places[number]
        if place >= self.count:
            raise KeyError(number)
        return self._turns[place]

    def get(self, number: int) -> Turn | None:
        place = self._places.get(number, self.count)
        return self._turns[place] if place < self.count else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Turns) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Turns({list(self)!r})"

    def committed_after(self, seq: int) -> Iterator[Turn]:
        """The turns whose commits are later events than `seq`, the newest first."""
        return takewhile(lambda turn: turn.seq > seq, reversed(self))

    def added(self, turn: Turn) -> Turns:
        """These turns and a new one. Raises ValueError if its number is taken."""
        count = self.count
        if self._places.get(turn.number, count) < count:
            raise ValueError(f"turn {turn.number} is committed twice")
        if not count or len(self._turns) != count:
            return Turns([*self, turn])
        after = Turns.__new__(Turns)
        after._turns, after._places, after.count = self._turns, self._places, count + 1
        after._turns.append(turn)
        after._places[turn.number] = count
        after.newest = turn
        return after

    def tentative(self) -> Turns:
        """These turns, to which one may be added to see what would follow: the shared storage stays as it is."""
        return _Tentative(self)


class _Tentative(Turns):
    """Turns of which the last, if any, is not in the shared storage."""

    __slots__ = ("_base", "_last")

    def __init__(self, base: Turns, last: Turn | None = None) -> None:
        self._base = base
        self._last = last
        self.count = base.count + (last is not None)
        self.newest = last or base.newest

    def __iter__(self) -> Iterator[Turn]:
        yield from self._base
        if self._last is not None:
            yield self._last

    def __reversed__(self) -> Iterator[Turn]:
        if self._last is not None:
            yield self._last
        yield from reversed(self._base)

    def __contains__(self, number: object) -> bool:
        return number in self._base or (self._last is not None and number == self._last.number)

    def __getitem__(self, number: int) -> Turn:
        found = self.get(number)
        if found is None:
            raise KeyError(number)
        return found

    def get(self, number: int) -> Turn | None:
        if self._last is not None and number == self._last.number:
            return self._last
        return self._base.get(number)

    def added(self, turn: Turn) -> Turns:
        if self._last is not None:
            return Turns([*self, turn])
        if turn.number in self:
            raise ValueError(f"turn {turn.number} is committed twice")
        return _Tentative(self._base, turn)
