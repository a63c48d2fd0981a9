"""A row after the other, each complete by itself: `ndjson` and `msgpack`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from app.export import jsontext
from app.export.containers.writer import PIECE, Buffer, Instead, encoded, refuse
from app.export.row import Fields


class RowWriter:
    """Neither needs to know the columns, nor has anything to say at the end."""

    def __init__(self, media_type: str, suffix: str, encode: Callable[[Fields], bytes], instead: Instead) -> None:
        self.media_type = media_type
        self.suffix = suffix
        self._encode = encode
        self._instead = instead

    def write(self, rows: Iterable[Fields]) -> Iterator[bytes]:
        pending: list[bytes] = []
        size = 0
        for line in encoded(rows, self._encode, self._instead):
            pending.append(line)
            size += len(line)
            if size >= PIECE:
                yield b"".join(pending)
                pending, size = [], 0
        if pending:
            yield b"".join(pending)

    def pack(self, rows: Sequence[Fields]) -> bytes:
        return b"".join(encoded(rows, self._encode, self._instead))

    def add(self, packed: Buffer) -> Iterator[bytes]:
        return iter((bytes(packed),) if packed else ())

    def finish(self) -> Iterator[bytes]:
        return iter(())

    def close(self) -> None:
        pass


def ndjson(instead: Instead = refuse) -> RowWriter:
    """One JSON object a line."""
    return RowWriter("application/x-ndjson", ".ndjson", lambda row: jsontext.encode(row) + b"\n", instead)


def msgpack(instead: Instead = refuse) -> RowWriter:
    """One map a row; an array is a map of `dtype` (numpy's name with its byte order, little), `shape` and `data`."""
    encoder = msgspec.msgpack.Encoder(enc_hook=_array)

    def encode(row: Fields) -> bytes:
        parsed = _parsed(row)
        try:
            return encoder.encode(parsed)
        except OverflowError:
            return encoder.encode(_held(parsed))

    return RowWriter("application/vnd.msgpack", ".msgpack", encode, instead)


def _held(value: object) -> object:
    """The same, integers of more than 64 bits as their decimal text: JSON has them, MessagePack does not."""
    match value:
        case bool() | str() | bytes() | np.ndarray():
            return value
        case int():
            return value if -(1 << 63) <= value < 1 << 64 else str(value)
        case Mapping():
            return {key: _held(item) for key, item in value.items()}
        case Sequence():
            return [_held(item) for item in value]
    return value


def _parsed(value: object) -> object:
    """The same, raw JSON parsed: a reader of msgpack shall not need a second one."""
    match value:
        case msgspec.Raw():
            return msgspec.json.decode(value)
        case str() | bytes() | np.ndarray():
            return value
        case Mapping():
            return {key: _parsed(item) for key, item in value.items()}
        case Sequence():
            return [_parsed(item) for item in value]
    return value


def _array(value: object) -> object:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} has no place in a row")
    little = value.astype(value.dtype.newbyteorder("<")) if sys.byteorder == "big" else value
    # memoryview.cast refuses an array without items.
    data = np.ascontiguousarray(little).data.cast("B") if value.size else b""
    return {"dtype": little.dtype.str, "shape": value.shape, "data": data}
