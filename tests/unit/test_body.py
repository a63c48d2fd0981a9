"""Bodies in pieces: what is sent is what was given, and long parts are not copied."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.upstream.body import JOINED, PIECE, pieces_of

SIZES = st.sampled_from([0, 1, 100, JOINED, JOINED + 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])


@given(st.lists(SIZES, max_size=8), st.booleans())
def test_pieces_are_the_parts(sizes: list[int], as_views: bool) -> None:
    parts: list[bytes | memoryview] = [bytes([65 + place]) * size for place, size in enumerate(sizes)]
    pieces = list(pieces_of([memoryview(part) for part in parts] if as_views else parts))
    assert b"".join(pieces) == b"".join(parts)
    assert all(0 < len(piece) <= PIECE for piece in pieces)
    assert len(pieces) <= 1 + 2 * sum(size > JOINED for size in sizes) + sum(sizes) // (PIECE - JOINED)


def test_long_parts_are_not_copied() -> None:
    short, long, longer = b"s" * JOINED, b"l" * PIECE, b"x" * (2 * PIECE)
    head, own, first, second, tail = pieces_of([short, long, longer, short])
    assert (head, tail) == (short, short)
    assert own is long
    assert isinstance(first, memoryview)
    assert isinstance(second, memoryview)
    assert first.obj is second.obj is longer
