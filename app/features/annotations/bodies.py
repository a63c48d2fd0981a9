"""Columns as bodies: JSON lists, `.npy` files and safetensors, both ways."""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from app.domain.columns import Column
from app.domain.events import ColumnType, Over
from app.errors import InvalidRequest
from workers.codec import describe

NPY, SAFETENSORS = "application/x-npy", "application/x-safetensors"

_DTYPES: dict[ColumnType, str] = {"float32": "<f4", "int32": "<i4"}
_TENSORS = {"F32": "<f4", "I32": "<i4", "U8": "|u1", "BOOL": "|b1"}
_MAX_HEADER = 64 << 10

_NPY_HEAD = re.compile(
    rb"\x93NUMPY(?:\x01\x00..|\x02\x00....)"
    rb"\{'descr': '([^']{1,8})', 'fortran_order': (True|False), 'shape': \(([0-9, ]{0,80})\), \} *\n",
    re.DOTALL,
)
"""Of versions 1.0 and 2.0, as numpy writes it."""


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


describe(dict[str, msgspec.Raw], _Tensor)


def from_list(values: Sequence[Any], dtype: ColumnType, over: Over) -> Column:
    """Numbers, and None where there is none. Raises InvalidRequest."""
    allowed = {float, int, type(None)} if dtype == "float32" else {int, type(None)}
    if not set(map(type, values)) <= allowed:
        at = next(at for at, value in enumerate(values) if type(value) not in allowed)
        raise InvalidRequest(f"values.{at}: expected {'a number' if dtype == 'float32' else 'an integer'} or null")
    mask = np.fromiter((value is not None for value in values), np.bool_, len(values))
    try:
        numbers = np.array([0 if value is None else value for value in values], np.float64)
    except OverflowError:
        raise InvalidRequest(f"values: a number is too large for {dtype}") from None
    return _column(numbers, dtype, over, None if mask.all() else mask)


def from_npy(body: bytes, over: Over) -> Column:
    """An `.npy` file of shape [T], or [2, T]: then the second row is not 0 where the first has a number.

    Raises InvalidRequest.
    """
    head = _NPY_HEAD.match(body)
    if head is None:
        raise InvalidRequest("the body is not a .npy file as numpy writes it")
    descr, order, dims = (part.decode() for part in head.groups())
    dtype = next((name for name, spelled in _DTYPES.items() if descr == spelled), None)
    if dtype is None:
        raise InvalidRequest(f"the .npy file has the type {descr}; expected float32 (<f4) or int32 (<i4)")
    shape = tuple(int(part) for part in dims.replace(",", " ").split())
    if len(shape) not in (1, 2) or (len(shape) == 2 and (shape[0] != 2 or order == "True")):
        raise InvalidRequest(f"the .npy file has the shape {shape}; expected (T,), or (2, T) in C order")
    data = memoryview(body)[head.end() :]
    if len(data) != math.prod(shape) * 4:
        raise InvalidRequest(f"the .npy file has {len(data)} bytes of data; its shape is {shape}")
    rows = np.frombuffer(data, descr).reshape(shape)
    return _column(rows, dtype, over, None) if rows.ndim == 1 else _column(rows[0], dtype, over, rows[1] != 0)


def from_safetensors(body: bytes, over: Over) -> Column:
    """A tensor `values` [T], and `mask` [T] (BOOL or U8) where not every number is there. Raises InvalidRequest."""
    tensors = _tensors(body)
    if "values" not in tensors or not tensors.keys() <= {"values", "mask"}:
        raise InvalidRequest(f"the tensors are {sorted(tensors)!s:.200}; expected values, and optionally mask")
    values, mask = tensors["values"], tensors.get("mask")
    name = next((name for name, spelled in _DTYPES.items() if values.dtype.str == spelled), None)
    if name is None or values.ndim != 1:
        raise InvalidRequest("values: expected F32 or I32 of the shape [T]")
    if mask is not None and (mask.dtype.str not in ("|u1", "|b1") or mask.shape != values.shape):
        raise InvalidRequest("mask: expected BOOL or U8 of the shape of values")
    return _column(values, name, over, None if mask is None else mask != 0)


def _tensors(body: bytes) -> dict[str, npt.NDArray[Any]]:
    """Raises InvalidRequest."""
    size = struct.unpack("<Q", body[:8])[0] if len(body) >= 8 else _MAX_HEADER + 1
    if size > min(_MAX_HEADER, len(body) - 8):
        raise InvalidRequest("the body is not a valid safetensors file")
    data = memoryview(body)[8 + size :]
    tensors: dict[str, npt.NDArray[Any]] = {}
    try:
        for name, raw in msgspec.json.decode(body[8 : 8 + size], type=dict[str, msgspec.Raw]).items():
            if name == "__metadata__":
                continue
            tensor = msgspec.json.decode(raw, type=_Tensor)
            start, end = tensor.data_offsets
            if tensor.dtype not in _TENSORS or not 0 <= start <= end <= len(data):
                raise ValueError
            tensors[name] = np.frombuffer(data[start:end], _TENSORS[tensor.dtype]).reshape(tensor.shape)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        raise InvalidRequest("the body is not a safetensors file of F32, I32, U8 and BOOL tensors") from None
    return tensors


def _column(numbers: npt.NDArray[Any], dtype: ColumnType, over: Over, mask: npt.NDArray[Any] | None) -> Column:
    """Raises InvalidRequest for a number that is not finite, or that the type does not hold."""
    there = numbers if mask is None else np.where(mask, numbers, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        values = there.astype(_DTYPES[dtype])
        is_held = np.isfinite(values) if dtype == "float32" else values == there
    if not is_held.all():
        raise InvalidRequest(f"values.{int(np.argmin(is_held))}: expected a finite {dtype}")
    return Column.of(over, values, mask)


def to_list(column: Column) -> list[Any]:
    """Numbers as numpy's own, and None where there is none."""
    return [value if there else None for value, there in zip(column.numbers, column.is_there, strict=True)]


def to_npy(column: Column) -> bytes:
    """As `from_npy` reads it."""
    out = io.BytesIO()
    numbers = column.numbers
    np.save(out, np.stack([numbers, column.is_there.astype(numbers.dtype)]) if column.mask else numbers)
    return out.getvalue()


def to_safetensors(column: Column) -> bytes:
    """As `from_safetensors` reads it."""
    count, size = len(column.numbers), len(column.values)
    dtype = "F32" if column.dtype == "float32" else "I32"
    header: dict[str, Any] = {"values": {"dtype": dtype, "shape": [count], "data_offsets": [0, size]}}
    if column.mask:
        header["mask"] = {"dtype": "BOOL", "shape": [count], "data_offsets": [size, size + count]}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + column.values + column.mask
