"""Shared memory that two sides hold by file descriptor; here both sides are in one process."""

from __future__ import annotations

import os

import pytest

from workers.segment import Segment

MIB = 1 << 20


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
