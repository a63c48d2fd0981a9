"""What every container does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from app.export.columns import Column
from app.export.row import Fields

Buffer = bytes | memoryview

EXCLUDED = "excluded"
"""The key, beside those of EXCLUSION, by which a row says why something is not in the export."""

EXCLUSION: dict[str, Column] = {
    "session_id": "text",
    "segment": "int64",
    "turn": "int64",
    EXCLUDED: "text",
    "cursor": "text",
}
"""The columns of such a row."""

PIECE = 1 << 20
"""Bytes of a piece, about."""


class ContainerWriter(Protocol):
    """Turns rows into pieces of one file. The same rows give the same bytes, however they were divided into calls.

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
