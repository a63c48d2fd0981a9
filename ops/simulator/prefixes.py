"""The engine's prefix cache: a prefix that was prefilled or sampled before needs no prefill, in any session."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict

import numpy as np

_WIDTH = 4
"""Bytes of a packed id."""


class PrefixCache:
    """A cache of at most ``tokens`` tokens. The least recently used sequences are shortened from their end.

    Sequences are packed ids. They stay sorted, so that no sequence begins more like another than one of its neighbours
    does. A session has one sequence, which its next turn replaces.
    """

    def __init__(self, tokens: int) -> None:
        self._capacity = tokens * _WIDTH
        self.clear()

    def clear(self) -> None:
        """Remove everything."""
        self._sorted: list[bytes] = []
        self._by_use: OrderedDict[bytes, None] = OrderedDict()
        self._size = 0  # bytes; what two sequences begin with counts once

    @property
    def tokens(self) -> int:
        """The number of cached tokens."""
        return self._size // _WIDTH

    def cached(self, prompt: bytes) -> int:
        """The number of leading ids of ``prompt`` that need no prefill. It excludes the last id, whose logits are
        needed."""
        return max(0, min(self._shared(prompt, bisect_left(self._sorted, prompt)), len(prompt) - _WIDTH) // _WIDTH)

    def served(self, sequence: bytes) -> None:
        """Add a prompt and the ids sampled after it."""
        at = bisect_right(self._sorted, sequence)
        self._size += len(sequence) - self._shared(sequence, at)
        if at and sequence.startswith(self._sorted[at - 1]):
            del self._by_use[self._sorted[at - 1]]
            self._sorted[at - 1] = sequence
        else:
            self._sorted.insert(at, sequence)
        self._by_use[sequence] = None
        while self._size > self._capacity:
            self._shorten_oldest()

    def _shared(self, sequence: bytes, at: int) -> int:
        """How many bytes of ``sequence`` its neighbours at this place begin with, in whole ids."""
        return max((_common(sequence, other) for other in self._sorted[max(at - 1, 0) : at + 1]), default=0)

    def _shorten_oldest(self) -> None:
        oldest, _ = self._by_use.popitem(last=False)
        at = bisect_left(self._sorted, oldest)
        del self._sorted[at]
        own, excess = len(oldest) - self._shared(oldest, at), self._size - self._capacity
        self._size -= min(own, excess)
        if own > excess:
            insort(self._sorted, oldest[:-excess])
            self._by_use[oldest[:-excess]] = None
            self._by_use.move_to_end(oldest[:-excess], last=False)


def _common(one: bytes, other: bytes) -> int:
    """The bytes that both begin with, in whole ids."""
    count = min(len(one), len(other)) // _WIDTH
    differ = np.frombuffer(one, np.int32, count) != np.frombuffer(other, np.int32, count)
    return (int(differ.argmax()) if differ.any() else count) * _WIDTH
