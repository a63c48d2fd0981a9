"""A pack: the frames of chunks one after the other, and behind them an index.

    <epoch>/<incarnation>/<number>-<bytes>      the object's name: who wrote it, and how long its frames are together
    frame frame frame … index                   the object

The index is a compressed list of `Entry`. It tells to which turns the bytes belong without the database: a turn whose
open row is gone can refer to them no more than it does already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from workers import codec
from workers.codec import CorruptContent


class InPack(msgspec.Struct, frozen=True):
    """`length` bytes from `offset` on in the object `pack`."""

    pack: str
    offset: int
    length: int


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A frame of a pack and the chunk that it is."""

    session_id: str
    fence: int
    number: int
    offset: int
    length: int

    @property
    def turn(self) -> tuple[str, int]:
        return self.session_id, self.fence


class Packed(NamedTuple):
    """A chunk's key and its compressed frame, on its way into a pack."""

    session_id: str
    fence: int
    number: int
    frame: bytes


class Pack(NamedTuple):
    """An object as it is uploaded, and the place of each frame in the given order."""

    name: str
    body: bytes
    places: list[InPack]


_INDEX = msgspec.msgpack.Decoder(list[Entry])


def build(stem: str, chunks: Sequence[Packed]) -> Pack:
    """The pack of these chunks; `stem` is its name without the length. Equal frames at the same address share bytes."""
    offsets: dict[int, int] = {}  # by identity: forks share a frame that is read once
    frames: list[bytes] = []
    entries: list[Entry] = []
    end = 0
    for chunk in chunks:
        offset = offsets.setdefault(id(chunk.frame), end)
        if offset == end:
            frames.append(chunk.frame)
            end += len(chunk.frame)
        entries.append(Entry(chunk.session_id, chunk.fence, chunk.number, offset, len(chunk.frame)))
    name = f"{stem}-{end}"
    body = b"".join((*frames, codec.compress(msgspec.msgpack.encode(entries))))
    return Pack(name, body, [InPack(name, entry.offset, entry.length) for entry in entries])


def frame_bytes(name: str) -> int | None:
    """How long a pack's frames are together; None if an object of this name is no pack."""
    stem, _, length = name.rpartition("-")
    return int(length) if stem.count("/") >= 2 and length.isascii() and length.isdigit() else None


def read_index(raw: bytes) -> list[Entry]:
    """The index of a pack, from its bytes behind the frames. Raises CorruptContent."""
    try:
        return _INDEX.decode(codec.decompress(raw))
    except msgspec.MsgspecError as error:
        raise CorruptContent(f"not the index of a pack: {error}") from error


def place_columns(place: InPack | None) -> dict[str, Any]:
    """The columns of a chunk that say where it is."""
    return {
        "location": None if place is None else place.pack,
        "pack_offset": None if place is None else place.offset,
        "pack_length": None if place is None else place.length,
    }


def distinct_bytes(places: Iterable[InPack]) -> int:
    """Bytes of these places; a fork's chunk is its source's."""
    return sum({place.offset: place.length for place in places}.values())
