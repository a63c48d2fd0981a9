"""Shared memory that two sides hold by file descriptor; here both sides are in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from workers.segment import SMALLEST, Segment

MIB = 1 << 20


@pytest.fixture
def ours() -> Iterator[Segment]:
    segment = Segment.create()
    yield segment
    segment.close()


@pytest.fixture
def theirs(ours: Segment) -> Iterator[Segment]:
    """The other side: the same file, mapped a second time."""
    segment = Segment(os.dup(ours.fd))
    yield segment
    segment.close()


def test_what_one_side_writes_the_other_reads(ours: Segment, theirs: Segment) -> None:
    ours.write(0, b"job")
    ours.write(3, b"body")
    assert theirs.read(0, 7) == b"jobbody"
    assert bytes(theirs.view(3, 7)) == b"body"
    ours.write(0, b"new")
    assert theirs.read(0, 7) == b"newbody"


def test_fit_follows_the_other_side(ours: Segment, theirs: Segment) -> None:
    theirs.grow(4 * MIB)
    theirs.write(4 * MIB - 3, b"end")
    assert ours.size == SMALLEST
    ours.fit()
    assert ours.read(4 * MIB - 3, 3) == b"end"
    ours.shrink(2 * MIB)
    theirs.fit()
    assert theirs.size == 2 * MIB


def test_shrinking_gives_the_memory_back_and_keeps_the_rest(ours: Segment) -> None:
    ours.grow(16 * MIB)
    ours.write(0, b"\x01" * (16 * MIB))
    ours.shrink(2 * MIB)
    assert os.fstat(ours.fd).st_blocks * 512 == 2 * MIB
    assert ours.read(0, 2 * MIB) == b"\x01" * (2 * MIB)
    ours.grow(4 * MIB)
    assert ours.read(2 * MIB, 2 * MIB) == bytes(2 * MIB)
    ours.write(2 * MIB - 1, b"\x02\x02")
    assert ours.read(2 * MIB - 2, 4) == b"\x01\x02\x02\x00"


def test_a_view_is_read_only_and_outlives_a_remap(ours: Segment) -> None:
    ours.write(0, b"body")
    view = ours.view(0, 4)
    with pytest.raises(TypeError):
        view[0] = 0
    ours.grow(4 * MIB)
    ours.close()
    assert bytes(view) == b"body"


def test_without_memfd_an_unlinked_file_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    segment = Segment.create()
    segment.grow(4 * MIB)
    segment.write(3 * MIB, b"there")
    assert os.fstat(segment.fd).st_nlink == 0
    other = Segment(os.dup(segment.fd))
    assert other.read(3 * MIB, 5) == b"there"
    other.close()
    segment.close()
