"""What a live chain of turns holds so far, joined by commas: its messages' raw JSON, or the text of its tokens."""

from __future__ import annotations

import bisect


class PrefixBuffer:
    """The items of the turns of one chain from its beginning; a rollback cuts it, a commit adds to its end.

    The next request's history, or its prompt, is spliced from it.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._turns: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._text)

    def upto(self, turn: int) -> bytes | None:
        """The items up to the end of turn `turn`; None if it is not here."""
        index = bisect.bisect_left(self._turns, turn)
        if index == len(self._turns) or self._turns[index] != turn:
            return None
        return bytes(memoryview(self._text)[: self._ends[index]])

    def extend(self, parent: int, turn: int, items: bytes, trimmed: int = 0) -> None:
        """Add a turn's items after those of `parent` (0: they begin a chain), less the parent's last `trimmed` ones.

        Where `parent` is not here, nothing is kept: the chain is read from the store when it is needed. Only items
        without commas of their own can be trimmed; the ends of turns that held them are not known any more then.
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
