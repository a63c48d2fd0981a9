"""The items of chains of turns, joined by commas: the raw JSON of their messages, or the text of their tokens."""

from __future__ import annotations

import bisect


class PrefixBuffer:
    """The items of one chain of turns from its beginning. A rollback cuts it; a commit appends to it.

    The next request's history or prompt is assembled from it, without a copy: if a turn still uses what it was given
    when the chain changes, the change is made to a copy.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._turns: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._text)

    def has(self, turn: int) -> bool:
        """Does the chain have the end of this turn?"""
        index = bisect.bisect_left(self._turns, turn)
        return index < len(self._turns) and self._turns[index] == turn

    def ends_with(self, turn: int) -> bool:
        return bool(self._turns) and self._turns[-1] == turn

    def copy(self) -> PrefixBuffer:
        made = PrefixBuffer()
        made._text, made._turns, made._ends = self._text[:], self._turns[:], self._ends[:]
        return made

    def upto(self, turn: int) -> memoryview | None:
        """The items up to the end of turn `turn`; None if they are not in memory."""
        index = bisect.bisect_left(self._turns, turn)
        if index == len(self._turns) or self._turns[index] != turn:
            return None
        return memoryview(self._text)[: self._ends[index]].toreadonly()

    def extend(self, parent: int, turn: int, items: bytes, trimmed: int = 0) -> None:
        """Add a turn's items after those of `parent` (0: they begin a chain), without the parent's last `trimmed`
        items.

        If `parent` is not in memory, nothing is kept; the chain is read from the store when it is needed. Items can be
        trimmed only if they contain no commas. The ends of turns in the trimmed part are then unknown.
        """
        kept = bisect.bisect_right(self._turns, parent)
        known = parent == 0 or (kept > 0 and self._turns[kept - 1] == parent)
        kept = kept if known else 0
        del self._turns[kept:], self._ends[kept:]
        self._cut(self._ends[-1] if self._ends else 0)
        if not known:
            return
        if trimmed:
            for _ in range(trimmed):
                self._cut(max(self._text.rfind(b","), 0))
            while self._ends and self._ends[-1] > len(self._text):
                del self._turns[-1], self._ends[-1]
        added = b"," + items if self._text and items else items
        try:
            self._text += added
        except BufferError:
            self._text = self._text + added
        self._turns.append(turn)
        self._ends.append(len(self._text))

    def _cut(self, size: int) -> None:
        """Keep the first `size` bytes."""
        try:
            del self._text[size:]
        except BufferError:
            self._text = self._text[:size]


MOST_CHAINS = 64
MOST_BYTES = 16 << 20
"""How many chains are kept, and their size together: those whose turns were used last, at least one."""


class PrefixBuffers:
    """The chains of a session whose next requests are likely."""

    def __init__(self) -> None:
        self._chains: list[PrefixBuffer] = []

    @property
    def size(self) -> int:
        """Bytes of all chains."""
        chains = self._chains
        return len(chains[0]) if len(chains) == 1 else sum(map(len, chains))

    def upto(self, turn: int) -> memoryview | None:
        """The items up to the end of turn `turn`; None if they are not in memory."""
        for chain in reversed(self._chains):
            found = chain.upto(turn)
            if found is not None:
                self.use(chain)
                return found
        return None

    def extend(self, parent: int, turn: int, items: bytes, trimmed: int = 0) -> None:
        """Add a turn's items to the chain of `parent`, as `PrefixBuffer.extend`; other chains stay."""
        chain = self._chain_to_extend(parent) or PrefixBuffer()
        chain.extend(parent, turn, items, trimmed)
        self.use(chain)

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
            self._chains = [*(one for one in self._chains if one is not chain), chain]
        while len(self._chains) > MOST_CHAINS or (len(self._chains) > 1 and self.size > MOST_BYTES):
            del self._chains[0]
