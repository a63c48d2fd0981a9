"""Cuts rows into slices that may be in memory together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import msgspec
import numpy as np

from app.export.row import Fields

SLICE_BYTES = 2 << 20
"""Approximate bytes of rows that are made together: a session may have many, each with its whole prompt."""


def some_rows(made: Iterator[Fields], limit: int, most: int = SLICE_BYTES) -> Iterator[Fields]:
    """The next rows: at most `limit`, and about `most` bytes of them. Each is made when it is asked for."""
    size = 0
    for row in islice(made, limit):
        size += sum(map(_weight, row.values()))
        yield row
        if size >= most:
            return


def next_rows(made: Iterator[Fields], limit: int, most: int = SLICE_BYTES) -> list[Fields]:
    """As `some_rows`, made."""
    return list(some_rows(made, limit, most))


def _weight(value: object) -> int:
    """Approximate bytes of a field."""
    if value is None or isinstance(value, (int, float)):
        return 8  # most fields
    match value:
        case np.ndarray():
            return value.nbytes
        case str() | bytes():
            return len(value)
        case msgspec.Raw():
            return len(memoryview(value))
        case list() | tuple():
            return sum(map(_weight, value))
    return 8
