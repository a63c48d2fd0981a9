"""An engine's reply in the pieces received: a large one is never joined, so it is in memory only once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

PIECE = 512 << 10
"""A longer body is sent in pieces of this size, so that other requests run in between."""

JOINED = 16 << 10
"""Parts up to this size are sent together with those beside them."""


class Body:
    """`size` bytes in non-empty `pieces`."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.pieces = pieces
        self.size = sum(map(len, pieces))

    def joined(self) -> bytes:
        """All of it, which pieces of bytes then are as well."""
        first = self.pieces[0] if len(self.pieces) == 1 else None
        if isinstance(first, bytes):
            return first
        joined = b"".join(self.pieces)
        if len(self.pieces) > 1:
            self.pieces = [joined]
        return joined

    def whole(self) -> bytes | memoryview:
        """All of it in one piece: what one is already is not copied."""
        return self.pieces[0] if len(self.pieces) == 1 else self.joined()

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
        if len(self.pieces) == 1 or (self.pieces and len(self.pieces[0]) >= size):
            return bytes(self.pieces[0][:size])
        return b"".join(self.slices(0, size))

    def without(self, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes | memoryview]:
        """The pieces with null in place of the values at these ranges [start, end); everything else is unchanged."""
        if not ranges:
            return self.pieces
        parts: list[bytes | memoryview] = []
        copied = 0
        if len(self.pieces) == 1:
            whole = memoryview(self.pieces[0])
            for start, end in sorted(ranges):
                parts += (whole[copied:start], b"null")
                copied = end
            return [*parts, whole[copied:]]
        for start, end in sorted(ranges):
            parts += [*self.slices(copied, start), b"null"]
            copied = end
        return [*parts, *self.slices(copied, self.size)]


def pieces_of(parts: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """A body in pieces of at most PIECE bytes: short parts joined, long ones as they are, without a copy. No piece is
    empty."""
    held, size = list[bytes | memoryview](), 0
    for part in parts:
        if held and (len(part) > JOINED or size > PIECE - JOINED):
            yield b"".join(held)
            held, size = [], 0
        if len(part) <= JOINED:
            if part:
                held.append(part)
                size += len(part)
        elif len(part) <= PIECE:
            yield part
        else:
            view = memoryview(part)
            yield from (view[start : start + PIECE] for start in range(0, len(view), PIECE))
    if held:
        yield b"".join(held)
