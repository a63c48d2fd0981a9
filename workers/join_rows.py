"""Joins the replay payloads of one turn's generations."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pybase64

from workers.parse import Rejected

_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])

_Rows = bytes | np.ndarray[Any, Any] | list[msgspec.Raw]
"""Rows of a payload: raw int32, an array, or JSON values."""


def join_rows(slices: Sequence[tuple[msgspec.Raw, int, int, int]], kind: str, *, npy: bool) -> bytes:
    """The rows of several payloads as one JSON value, in their spelling.

    Each slice: the value, how many rows it holds, and which of them, [start, stop), are taken. Raises Rejected if they
    differ in spelling or row size.
    """
    parts = [_rows(*one, npy=npy) for one in slices]
    widths = {_width(part, stop - start) for part, (_, _, start, stop) in zip(parts, slices, strict=True)}
    if len(widths) > 1:
        raise Rejected(f"{kind} of one turn's generations has rows of different sizes")
    return _encode(parts, kind)


def _rows(value: msgspec.Raw, rows: int, start: int, stop: int, *, npy: bool) -> _Rows:
    """Rows [start, stop) of a payload that holds `rows`."""
    text = bytes(value)
    if text[:1] == b"[":
        items = _ITEMS.decode(text)
        width = len(items) // rows
        return items[start * width : stop * width]
    data = pybase64.b64decode(msgspec.json.decode(text, type=str), validate=True)
    if npy:
        table: np.ndarray[Any, Any] = np.load(io.BytesIO(data), allow_pickle=False)
        return table[start:stop]
    width = len(data) // rows
    return data[start * width : stop * width]


def _width(part: _Rows, rows: int) -> int:
    """Number of ids in each of `rows` rows."""
    if isinstance(part, np.ndarray):
        return math.prod(part.shape[1:])
    if isinstance(part, list):
        return sum(1 + bytes(item).count(b",") for item in part) // rows
    return len(part) // rows // 4


def _encode(parts: Sequence[_Rows], kind: str) -> bytes:
    """The rows as one JSON value, in the parts' spelling. Raises Rejected if they differ in it."""
    first = parts[0]
    if isinstance(first, bytes) and all(isinstance(part, bytes) for part in parts):
        return b'"' + pybase64.b64encode(b"".join(part for part in parts if isinstance(part, bytes))) + b'"'
    if isinstance(first, list) and all(isinstance(part, list) for part in parts):
        return b"[" + b",".join(bytes(item) for part in parts if isinstance(part, list) for item in part) + b"]"
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) < len(parts) or any(array.shape[1:] != arrays[0].shape[1:] for array in arrays):
        raise Rejected(f"{kind} of one turn's generations are spelled in different ways")
    file = io.BytesIO()
    np.save(file, np.concatenate(arrays), allow_pickle=False)
    return b'"' + pybase64.b64encode(file.getvalue()) + b'"'
