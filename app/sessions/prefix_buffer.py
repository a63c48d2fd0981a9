"""The items of chains of turns, joined by commas: the raw JSON of their messages, or the text of their tokens."""

from __future__ import annotations

import bisect


class PrefixBuffer:
    """The items of one chain of turns from its beginning: `text`, in which turn `turns[n]` ends at `ends[n]`. A
    rollback cuts it; a commit appends to it.

    The next request's history or prompt is assembled from it, without a copy: if a turn still uses what it was given
    when the chain changes, the change is made to a copy.
    """

    def __init__(self) -> None:
        self.text = bytearray()
        self.turns: list[int] = []
        self.ends: list[int] = []

    def has(self, turn: int) -> bool:
        """Does the chain have the end of this turn?"""
        index = bisect.bisect_left(self.turns, turn)
        return index < len(self.turns) and self.turns[index] == turn

    def ends_with(self, turn: int) -> bool:
        return bool(self.turns) and self.turns[-1] == turn

    def copy(self) -> PrefixBuffer:
        made = PrefixBuffer()
        made.text, made.turns, made.ends = self.text[:], self.turns[:], self.ends[:]
        return made

    def upto(self, turn: int) -> memoryview | None:
        """The items up to the end of turn `turn`; None if they are not in memory."""
        index = bisect.bisect_left(self.turns, turn)
        if index == len(self.turns) or self.turns[index] != turn:
            return None
        return memoryview(self.text)[: self.ends[index]].toreadonly()

    def extend(self, parent: int, turn: int, items: bytes, trimmed: int = 0) -> None:
        """Add a turn's items after those of `parent` (0: they begin a chain), without the parent's last `trimmed`
        items.

        If `parent` is not in memory, nothing is kept; the chain is read from the store when it is needed. Items can be
        trimmed only if they contain no commas. The ends of turns in the trimmed part are then unknown.
        """
        kept = bisect.bisect_right(self.turns, parent)
        known = parent == 0 or (kept > 0 and self.turns[kept - 1] == parent)
        kept = kept if known else 0
        del self.turns[kept:], self.ends[kept:]
        self._cut(self.ends[-1] if self.ends else 0)
        if not known:
            return
        if trimmed:
            for _ in range(trimmed):
                self._cut(max(self.text.rfind(b","), 0))
            while self.ends and self.ends[-1] > len(self.text):
                del self.turns[-1], self.ends[-1]
        added = b"," + items if self.text and items else items
        try:
            self.text += added
        except BufferError:
            self.text = self.text + added
        self.turns.append(turn)
        self.ends.append(len(self.text))

    def _cut(self, size: int) -> None:
        """Keep the first `size` bytes."""
        try:
            del self.text[size:]
        except BufferError:
            self.text = self.text[:size]


MOST_CHAINS = 64
MOST_BYTES = 16 << 20
"""How many chains are kept, and their size together: those whose turns were used last, at least one."""


class PrefixBuffers:
    """The chains of a session whose next requests are likely; `size` are the bytes of all."""

    def __init__(self) -> None:
        self._chains: list[PrefixBuffer] = []
        self.size = 0

    def upto(self, turn: int) -> memoryview | None:
        """The items up to the end of turn `turn`; None if they are not in memory."""
        chains = self._chains
        if chains and chains[-1].turns and chains[-1].turns[-1] == turn:
            return memoryview(chains[-1].text).toreadonly()
        for chain in reversed(chains):
            found = chain.upto(turn)
            if found is not None:
                self.use(chain)
                return found
        return None

    def extend(self, parent: int, turn: int, items: bytes, trimmed: int = 0) -> None:
        """Add a turn's items to the chain of `parent`, as `PrefixBuffer.extend`; other chains stay."""
        newest = self._chains[-1] if self._chains else None
        if newest is None or not newest.turns or newest.turns[-1] != parent or trimmed:
            chain = self._chain_to_extend(parent) or PrefixBuffer()
            chain.extend(parent, turn, items, trimmed)
            self.use(chain)
            return
        added = b"," + items if newest.text and items else items
        try:
            newest.text += added
        except BufferError:  # A turn still uses what it was given.
            newest.text = newest.text + added
        newest.turns.append(turn)
        newest.ends.append(len(newest.text))
        self.size += len(added)
        if len(self._chains) > 1 and self.size > MOST_BYTES:
            self.use(newest)

    def _chain_to_extend(self, parent: int) -> PrefixBuffer | None:
        """The chain that ends with `parent`, or a copy of one that has it."""
        if not parent:
            return None
        of_parent = [chain for chain in reversed(self._chains) if chain.has(parent)]
        ending = next((chain for chain in of_parent if chain.ends_with(parent)), None)
        if ending is not None:
            return ending
        return of_parent[0].copy() if of_parent else None

    def use(self, chain: PrefixBuffer) -> None:
        """Keep a chain, as the one that was used last."""
        if not self._chains or self._chains[-1] is not chain:
            self._chains = [*(other for other in self._chains if other is not chain), chain]
        self.size = sum(len(kept.text) for kept in self._chains)
        while len(self._chains) > MOST_CHAINS or (len(self._chains) > 1 and self.size > MOST_BYTES):
            self.size -= len(self._chains.pop(0).text)
