"""Columns: one number for each token of a turn, or for those that it sampled, written after the turn was taken."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from app.domain.events import ColumnRef, ColumnType, Over
from app.domain.samples import Array, TurnSpan
from workers import codec


class Column(msgspec.Struct, frozen=True):
    """A turn's numbers. `values` are little-endian and have 4 bytes each; `mask` has a byte for each, 0 where the token
    has no value (its number is 0 then), and is empty where every token has one."""

    dtype: ColumnType
    over: Over
    values: bytes
    mask: bytes = b""

    @classmethod
    def of(cls, over: Over, values: npt.NDArray[Any], mask: npt.NDArray[Any] | None = None) -> Column:
        """`values` (float32 or int32) and `mask` have one dimension and one length."""
        dtype: ColumnType = "float32" if values.dtype.kind == "f" else "int32"
        if mask is None or mask.all():
            return cls(dtype, over, values.astype(_little(dtype)).tobytes())
        there = mask.astype(np.bool_)
        return cls(dtype, over, np.where(there, values, 0).astype(_little(dtype)).tobytes(), there.tobytes())

    @property
    def size(self) -> int:
        return len(self.values) + len(self.mask)

    @property
    def numbers(self) -> Array:
        return np.frombuffer(self.values, _little(self.dtype))

    @property
    def is_there(self) -> Array:
        """1 where there is a value, else 0 (uint8)."""
        return np.frombuffer(self.mask, np.uint8) if self.mask else np.ones(len(self.values) // 4, np.uint8)

    def ref(self, frame: bytes) -> ColumnRef:
        """How an event describes the column, of which `frame` is what `pack` gave."""
        return ColumnRef(self.dtype, self.over, len(self.values) // 4, _hash(frame), self.mask.count(0))


codec.describe(Column)


def unpack(frame: bytes, ref: ColumnRef | None = None) -> Column:
    """A stored column. Raises CorruptContent, also if it is not what `ref` describes."""
    if ref is not None and _hash(frame) != ref.hash:
        raise codec.CorruptContent("a column's hash differs from the log's")
    try:
        return msgspec.msgpack.decode(codec.decompress(frame), type=Column)
    except msgspec.MsgspecError as error:
        raise codec.CorruptContent(f"not a column: {error}") from error


class AlignedColumn(msgspec.Struct, frozen=True):
    """A row's column: `values[T]` (float32, int32, or float64 where its turns have both), `mask[T]` (uint8)."""

    values: Array
    mask: Array


def align(spans: Sequence[TurnSpan], columns: Mapping[int, Column]) -> AlignedColumn | None:
    """The columns of a row's turns, by turn, as one of all its tokens; None where no turn has one."""
    if not columns:
        return None
    values = np.zeros(spans[-1].end, np.result_type(*(column.dtype for column in columns.values())))
    mask = np.zeros(spans[-1].end, np.uint8)
    for span in spans:
        if (column := columns.get(span.turn)) is not None:
            start = span.output_start if column.over == "output" else span.start
            values[start : span.end] = column.numbers[: span.end - start]
            mask[start : span.end] = column.is_there[: span.end - start]
    return AlignedColumn(values, mask)


def _little(dtype: ColumnType) -> str:
    return "<f4" if dtype == "float32" else "<i4"


def _hash(frame: bytes) -> str:
    return hashlib.sha256(frame).hexdigest()
