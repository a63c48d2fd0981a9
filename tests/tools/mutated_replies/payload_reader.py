"""Replay payloads, read slowly: base64 of int32, base64 of a `.npy` file, or nested lists of integers."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = ("routed_experts", "indexer_topk")
LOWEST = {"routed_experts": 0, "indexer_topk": -1}
HIGHEST = 2**31 - 1

_INTEGER = re.compile(r"-?[0-9]{1,40}")
_ALPHABET = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_HEADER = re.compile(
    r"\s*\{\s*'descr'\s*:\s*'([<|][iu][1248])'\s*,\s*'fortran_order'\s*:\s*False\s*,"
    r"\s*'shape'\s*:\s*\(([0-9, ]*)\)\s*,?\s*\}\s*"
)


class Malformed(Exception):
    """The reply breaks a rule; the message names it."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`ids` of rows [start, start + rows), one row after the other."""

    start: int
    rows: int
    ids: list[int]

    @property
    def width(self) -> int:
        """Ids in a row."""
        return len(self.ids) // self.rows if self.rows else 0


def read_payload(value: Any, kind: str, rows: int, start: int, npy: bool) -> Rows:
    """A payload of `rows` rows as the reader's JSON value. Raises Malformed."""
    if isinstance(value, list):
        ids = _nested(value, rows)
    elif isinstance(value, str):
        ids = _binary(_base64(value), rows, npy)
    else:
        raise Malformed(f"{kind} is neither a string nor a list")
    if len(ids) % rows if rows else ids:
        raise Malformed(f"{kind} is not a whole number of rows")
    if any(not LOWEST[kind] <= number <= HIGHEST for number in ids):
        raise Malformed(f"{kind} holds an id that is out of range")
    return Rows(start, rows, ids)


def _base64(text: str) -> bytes:
    if len(text) % 4 or not _ALPHABET.fullmatch(text):
        raise Malformed("a payload is not base64")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise Malformed("a payload is not base64") from error


def _binary(raw: bytes, rows: int, npy: bool) -> list[int]:
    if npy or raw.startswith(b"\x93NUMPY"):
        return _npy(raw, rows)
    if len(raw) % 4:
        raise Malformed("a payload is not a whole number of ids")
    return [int(number) for number in np.frombuffer(raw, "<i4")]


def _npy(raw: bytes, rows: int) -> list[int]:
    """The format's versions 1 to 3: magic, version, length of the header, the header as a Python literal, data."""
    if not raw.startswith(b"\x93NUMPY") or raw[6:8] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise Malformed("a payload is not a .npy file")
    wide = 2 if raw[6] == 1 else 4
    begin = 8 + wide
    end = begin + int.from_bytes(raw[8:begin], "little")
    header = _HEADER.fullmatch(raw[begin:end].decode("latin-1"))
    if header is None or len(raw) < end:
        raise Malformed("a .npy payload has a header that is not one of little-endian integers in C order")
    shape = [int(part) for part in header[2].replace(" ", "").split(",") if part]
    data = raw[end:]
    size = int(header[1][2])
    for length in shape:
        size *= length
    if len(data) != size or not shape or shape[0] != rows:
        raise Malformed("a .npy payload does not have the shape that is due")
    return [int(number) for number in np.frombuffer(data, header[1])]


def _nested(value: list[Any], rows: int) -> list[int]:
    ids: list[int] = []
    shape = _shape(value, ids)
    if len(shape) > 1 and shape[0] != rows:
        raise Malformed("a nested payload has another number of rows")
    return ids


def _shape(value: list[Any], ids: list[int]) -> tuple[int, ...]:
    """The shape of regular nested lists; their integers go to `ids`. Raises Malformed for ragged ones."""
    inner: set[tuple[int, ...]] = set()
    for item in value:
        if isinstance(item, list):
            inner.add(_shape(item, ids))
        elif isinstance(item, tuple) and item[0] == "#" and _INTEGER.fullmatch(item[1]):
            inner.add(())
            ids.append(int(item[1]))
        else:
            raise Malformed("a nested payload holds something else than integers")
    if len(inner) > 1:
        raise Malformed("a nested payload is ragged")
    return (len(value), *next(iter(inner), ()))
