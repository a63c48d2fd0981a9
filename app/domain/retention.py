"""Which replay payloads are kept, and which chunks are freed with the others.

A payload of T tokens has T - 1 rows, and a turn's rows begin with those of the turn it continues, so a leaf's newest
payload holds them all. Older ones are kept only as far back as a retry may go. An engine may give a token another row
when it prefills it for a later turn; a session that retains `sampled` keeps each live turn's rows of its own tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from app.domain.events import BlobsTombstoned, ChunkKey, ChunkRef, ReplayKind, TombstoneReason
from app.domain.rules import TreeIndex, is_superseded, superseded_payloads
from app.domain.session import Payload, Session


class ChunkUses:
    """How many readable payloads refer to each chunk, the bytes of all chunks together, and all references to them."""

    def __init__(self, payloads: Iterable[Sequence[Payload]] = ()) -> None:
        self._uses: Counter[ChunkKey] = Counter()
        self.bytes = self.references = 0
        for of_turn in payloads:
            self.add(of_turn)

    def add(self, payloads: Sequence[Payload]) -> None:
        """A turn's payloads can be read."""
        for chunk in _chunks(payloads):
            self.bytes += 0 if chunk.key in self._uses else chunk.size
            self._uses[chunk.key] += 1
            self.references += 1

    def remove(self, payloads: Sequence[Payload]) -> list[ChunkKey]:
        """A turn's payloads can no longer be read; returns the chunks that no other one refers to."""
        freed: list[ChunkKey] = []
        for chunk in _chunks(payloads):
            self._uses[chunk.key] -= 1
            self.references -= 1
            if not self._uses[chunk.key]:
                del self._uses[chunk.key]
                self.bytes -= chunk.size
                freed.append(chunk.key)
        return freed


def tombstones(
    session: Session,
    index: TreeIndex,
    max_bytes: int | None = None,
    uses: ChunkUses | None = None,
    pinned_upto: int = 0,
) -> BlobsTombstoned | None:
    """The payloads that leave the window with the commit of the newest turn, if any.

    For each leaf and kind, the newest `rollback_window` + 1 turns with a payload are kept; with `retain: all` every
    turn, with `sampled` a live turn's own rows behind the window. What a turn in flight continues is kept too: its
    payload may share chunks. If all payloads together exceed `max_bytes`, those of the leaves that were idle longest
    are dropped as well.

    A checkpoint pins what could be read when it was made: the payloads of turns that were committed up to event
    `pinned_upto`. Those of turns that are undone are dropped as soon as no checkpoint pins them.

    `index` and `uses` are those before the commit; the uses are counted where they are not given.
    """
    newest = session.leaf
    own = () if newest is None else session.payloads.get(newest.number, ())
    if uses is None:
        uses = ChunkUses(payloads for payloads in session.every_payload.values() if payloads is not own)
    uses.add(own)
    pinned, every = _pinned(session, pinned_upto), session.every_payload
    gone = superseded_payloads(session, index)
    dropped = _behind_window(session, gone, index if session.history == "tree" else None, pinned)
    kept = _own_rows(session, dropped, gone)
    for payloads in kept.values():
        uses.add(payloads)
    dropped += [turn for turn in session.undone_payloads if turn not in pinned]
    freed = [key for turn in dropped for key in uses.remove(every[turn])]
    lost = set(dropped)
    left = {turn: payloads for turn, payloads in session.payloads.items() if turn not in lost} | kept
    over, freed_over = _over_budget(session, left, uses, max_bytes, pinned)
    freed += freed_over
    for turn in over:
        uses.add(left[turn])
    for turn in dropped:
        uses.add(every[turn])
    for payloads in (own, *kept.values()):
        uses.remove(payloads)
    return _event({*dropped, *over}, freed, "budget" if over else "window", kept.keys() - over)


def tombstones_of_fork(session: Session, lost: Collection[int], own: Collection[int]) -> BlobsTombstoned | None:
    """As `tombstones`, of copied turns; `lost` are those whose payloads can no longer be read at the source, `own`
    those of which it has only the turn's own rows."""
    readable = {turn: payloads for turn, payloads in session.payloads.items() if turn not in lost and turn not in own}
    dropped = [*lost, *own, *_behind_window(msgspec.structs.replace(session, payloads=readable), (), None, ())]
    kept = _own_rows(session, dropped, lost)
    uses = ChunkUses([*session.payloads.values(), *kept.values()])
    freed = [key for turn in dropped for key in uses.remove(session.payloads[turn])]
    return _event(dropped, freed, "window", kept)


def tombstone_all(session: Session) -> BlobsTombstoned | None:
    """All remaining payloads, when a session has been closed for long enough."""
    keys = {chunk.key for payloads in session.every_payload.values() for chunk in _chunks(payloads)}
    return _event(list(session.every_payload), keys, "closed")


def _event(
    turns: Collection[int], freed: Iterable[ChunkKey], reason: TombstoneReason, own: Iterable[int] = ()
) -> BlobsTombstoned | None:
    return BlobsTombstoned(tuple(sorted(turns)), tuple(sorted(freed)), reason, tuple(sorted(own))) if turns else None


def _own_rows(session: Session, dropped: Iterable[int], gone: Collection[int]) -> dict[int, tuple[Payload, ...]]:
    """What is kept of these turns' payloads, but for turns that no row is made of."""
    if session.config.retain != "sampled":
        return {}
    kept = {turn: session.own_payloads(turn) for turn in dropped if turn not in gone}
    return {turn: payloads for turn, payloads in kept.items() if payloads}


def _behind_window(
    session: Session, gone: Collection[int], index: TreeIndex | None, pinned: Collection[int]
) -> list[int]:
    """`index`: of a tree; without it the session has one leaf."""
    if session.config.retain == "all":
        return []
    window = session.config.rollback_window
    ranks: dict[tuple[int, ReplayKind], int] = {}
    dropped: list[int] = []
    for number in sorted(session.payloads, key=lambda number: session.turn(number).seq, reverse=True):
        kinds = [payload.kind for payload in session.whole_payloads(number)]
        if number in gone:
            if number not in pinned:
                dropped.append(number)
            continue
        for kind in kinds:
            rank = ranks.get((number, kind), 0)
            if rank and index is not None and _ends_bare(session, index, number, kind):
                rank = ranks[number, kind] = 0
            before = _before(session, number, kind)
            ranks[before, kind] = min(ranks.get((before, kind), rank + 1), rank + 1)
        if kinds and number not in pinned and all(ranks.get((number, kind), 0) > window for kind in kinds):
            dropped.append(number)
    return dropped


def _ends_bare(session: Session, index: TreeIndex, number: int, kind: ReplayKind) -> bool:
    """Is turn `number`'s payload of a kind the newest of a leaf, which brought none itself?"""
    todo = [number]
    while todo:
        at = todo.pop()
        children = {child for child in _continuing(session, index, at) if not is_superseded(session, index, child)}
        if at != number and not children:
            return True
        todo += [child for child in children if session.payload(child, kind) is None]
    return False


def _continuing(session: Session, index: TreeIndex, number: int) -> set[int]:
    """The turns that continue the tokens of turn `number`. `index` may lack the newest turn."""
    continuing = {turn.number for turn in index.siblings(number) if turn.token_parent}
    newest = session.leaf
    return continuing | {newest.number} if newest is not None and newest.token_parent == number else continuing


def _pinned(session: Session, upto: int) -> set[int]:
    """The turns whose payloads a turn in flight may share, and those that a checkpoint needs."""
    continued = {open_turn.parent for open_turn in session.open_turns.values()}
    return continued | {turn.number for turn in session.every_turn if turn.seq <= upto} if upto else continued


def _before(session: Session, number: int, kind: ReplayKind) -> int:
    """The nearest turn before `number`, in the tokens that it continues, with a readable payload of a kind; else 0."""
    at = session.turn(number).token_parent
    while at and session.payload(at, kind) is None:
        at = session.turn(at).token_parent
    return at


def _over_budget(
    session: Session,
    left: Mapping[int, Sequence[Payload]],
    uses: ChunkUses,
    max_bytes: int | None,
    pinned: Collection[int],
) -> tuple[list[int], list[ChunkKey]]:
    """The turns to drop of those `left`, the longest idle first, until what is left fits, and the chunks that this
    frees; the newest turn's payloads always stay.

    Their payloads are removed from `uses`.
    """
    turns: list[int] = []
    freed: list[ChunkKey] = []
    if max_bytes is None or uses.bytes <= max_bytes:
        return turns, freed
    for number in sorted(left, key=lambda number: session.turn(number).seq)[:-1]:
        if uses.bytes <= max_bytes:
            break
        if number not in pinned:
            turns.append(number)
            freed += uses.remove(left[number])
    return turns, freed


def _chunks(payloads: Iterable[Payload]) -> Iterator[ChunkRef]:
    return (chunk for payload in payloads for chunk in payload.chunks)


def chunk_keys(payloads: Iterable[Payload]) -> set[ChunkKey]:
    return {chunk.key for chunk in _chunks(payloads)}
