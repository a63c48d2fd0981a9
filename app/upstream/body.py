"""An engine's reply in the pieces it came in: a large one is never joined, so it is in memory once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Body:
    """`len(body)` bytes in `pieces`, none of them empty."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.pieces = pieces
        self._size = sum(map(len, pieces))

    def __len__(self) -> int:
        return self._size

    def joined(self) -> bytes:
        first = self.pieces[0] if len(self.pieces) == 1 else None
        return first if isinstance(first, bytes) else b"".join(self.pieces)

    def slices(self, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes [start, stop), without a copy."""
        at = 0
        for piece in self.pieces:
            end = at + len(piece)
            if start < end and at < stop:
                yield memoryview(piece)[max(start - at, 0) : stop - at]
            at = end

    def beginning(self, size: int) -> bytes:
        """The first `size` bytes, or all of them."""
        return b"".join(self.slices(0, size))

    def without(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes | memoryview]:
        """The pieces with null for the values at these ranges [start, end); everything else is untouched."""
        if not ranges:
            return self.pieces
        parts: list[bytes | memoryview] = []
        done = 0
        for start, end in sorted(ranges):
            parts += [*self.slices(done, start), b"null"]
            done = end
        return [*parts, *self.slices(done, len(self))]
