"""The items of a chain of turns, joined by commas: the raw JSON of its messages, or the text of its tokens."""

from __future__ import annotations

import bisect


class PrefixBuffer:
    """The items of one chain of turns from its beginning. A rollback cuts it; a commit appends to it.

    The next request's history or prompt is assembled from it.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._turns: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._text)

    def upto(self, turn: int) -> bytes | None:
        """The items up to the end of turn `turn`; None if they are not in memory."""
        index = bisect.bisect_left(self._turns, turn)
        if index == len(self._turns) or self._turns[index] != turn:
            return None
        return bytes(memoryview(self._text)[: self._ends[index]])

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
        del self._text[self._ends[-1] if self._ends else 0 :]
        if not known:
            return
        if trimmed:
            for _ in range(trimmed):
                del self._text[max(self._text.rfind(b","), 0) :]
            while self._ends and self._ends[-1] > len(self._text):
                del self._turns[-1], self._ends[-1]
        self._text += b"," + items if self._text and items else items
        self._turns.append(turn)
        self._ends.append(len(self._text))
