"""What every container does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from app.export.row import Column, Fields

Buffer = bytes | memoryview

T = TypeVar("T")

EXCLUDED = "excluded"
"""The key, beside those of EXCLUSION, by which a row says why something is not in the export."""

EXCLUSION: dict[str, Column] = {
    "session_id": "text",
    "segment": "int64",
    "turn": "int64",
    EXCLUDED: "text",
    "cut_tokens": "int64",
    "cursor": "text",
}
"""The columns of such a row."""

PIECE = 1 << 20
"""Bytes of a piece, about."""

Instead = Callable[[Fields, Exception], Fields | None]
"""What stands in the place of a row that a container cannot hold; None: nothing does."""


def refuse(row: Fields, error: Exception) -> Fields | None:
    raise error


def encoded(rows: Iterable[Fields], encode: Callable[[Fields], T], instead: Instead) -> Iterator[T]:
    """Each row, encoded; one that cannot be leaves nothing behind but what stands in its place."""
    for row in rows:
        try:
            made = encode(row)
        except Exception as error:  # noqa: BLE001 - a row's fault, whatever it is, is its session's business
            other = instead(row, error)
            if other is None:
                continue
            made = encode(other)
        yield made


class ContainerWriter(Protocol):
    """Turns rows into pieces of one file. The same rows give the same bytes, however they were divided into calls.

    A row that it cannot hold is replaced by what its `Instead` gives, and the others are written.

    `pack` does what needs no knowledge of other rows; it may run in another process, whose result `add` takes. No
    piece is empty. `finish` is called once, after the last row; `close` in any case.
    """

    @property
    def media_type(self) -> str: ...
    @property
    def suffix(self) -> str: ...
    def write(self, rows: Iterable[Fields]) -> Iterator[bytes]:
        """As `add(pack(rows))`."""

    def pack(self, rows: Sequence[Fields]) -> bytes: ...
    def add(self, packed: Buffer) -> Iterator[bytes]: ...
    def finish(self) -> Iterator[bytes]: ...
    def close(self) -> None:
        """Free what is held outside memory."""
