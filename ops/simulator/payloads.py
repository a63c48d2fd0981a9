"""Replay payloads and padding, drawn from tables and cached.

A row depends on its position and on the beginning of the prompt, not on the turn. So a longer turn of a conversation
repeats the rows of the shorter one, as an engine with a warm cache does, and another conversation has other rows.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pybase64

from ops.simulator.lru import Lru

_SHIFTS = 997
_HEAD_BYTES = 64
_FIRST_ROWS = 2048
_BLOCK_BYTES = 256 * 2**10
_CACHE_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape ``[rows, layers, top_k]`` without the rows.

    ``experts`` is the exclusive bound of an id. 0 means that ids are positions, bounded by their row
    (``indexer_topk``). Another ``shift`` gives other rows.
    """

    layers: int
    top_k: int
    experts: int
    shift: int = 0

    @property
    def cells(self) -> int:
        return self.layers * self.top_k


class Payloads:
    """Draws payloads and caches their encoded form."""

    def __init__(self, seed: int) -> None:
        self._seed = abs(seed)
        self._tables: dict[Shape, npt.NDArray[np.int32]] = {}
        self._encoded: Lru[tuple[Shape, int, int, int, str], bytes] = Lru(_CACHE_BYTES)
        self._block = b"x" * _BLOCK_BYTES

    def rows(self, shape: Shape, start: int, stop: int, sequence: bytes) -> npt.NDArray[np.int32]:
        """Rows ``[start, stop)`` as int32 ``[rows, layers, top_k]``.

        ``sequence`` is the packed prompt and output; its first 16 ids choose the rows.
        """
        return self._slice(shape, start, stop, self._shift(shape, sequence))

    def base64(self, shape: Shape, start: int, stop: int, sequence: bytes) -> bytes:
        """The rows as a JSON string of base64 of raw int32."""
        return self._kept(shape, start, stop, sequence, "raw")

    def npy(self, shape: Shape, start: int, stop: int, sequence: bytes) -> bytes:
        """The rows as a JSON string of base64 of a ``.npy`` file."""
        return self._kept(shape, start, stop, sequence, "npy")

    def nested(self, shape: Shape, start: int, stop: int, sequence: bytes) -> bytes:
        """The rows as nested JSON lists."""
        return self._kept(shape, start, stop, sequence, "nested")

    def padding(self, size: int) -> list[bytes]:
        """A JSON string of ``size`` bytes, including the quotes, as a list of shared parts."""
        blocks, rest = divmod(size - 2, len(self._block))
        return [b'"', *[self._block] * blocks, self._block[:rest], b'"']

    @staticmethod
    def _shift(shape: Shape, sequence: bytes) -> int:
        return (zlib.crc32(sequence[:_HEAD_BYTES]) + shape.shift) % _SHIFTS

    def _kept(self, shape: Shape, start: int, stop: int, sequence: bytes, form: str) -> bytes:
        shift = self._shift(shape, sequence)
        key = (shape, start, stop, shift, form)
        found = self._encoded.get(key)
        if found is not None:
            return found
        rows = self._slice(shape, start, stop, shift)
        if form == "nested":
            text = str(rows.tolist()).replace(" ", "").encode()
        else:
            raw = _npy(rows) if form == "npy" else rows.tobytes()
            text = b'"' + pybase64.b64encode(raw) + b'"'
        return self._encoded.put(key, text, len(text) + 200)

    def _slice(self, shape: Shape, start: int, stop: int, shift: int) -> npt.NDArray[np.int32]:
        if shape.experts == 0:
            return _positions(shape, start, max(start, stop), shift)
        table = self._table(shape, stop + _SHIFTS)
        return table[start + shift : max(start, stop) + shift]

    def _table(self, shape: Shape, rows: int) -> npt.NDArray[np.int32]:
        shape = replace(shape, shift=0)
        table = self._tables.get(shape)
        if table is None or len(table) < rows:
            size = _FIRST_ROWS
            while size < rows:
                size *= 2
            rng = np.random.Generator(np.random.PCG64(self._seed))
            first = rng.integers(0, shape.experts, (size, shape.layers, 1), dtype=np.int32)
            steps = np.arange(shape.top_k, dtype=np.int32)
            table = ((first + steps) % shape.experts).astype("<i4")
            self._tables[shape] = table
        return table


def _positions(shape: Shape, start: int, stop: int, shift: int) -> npt.NDArray[np.int32]:
    """Row r holds positions in ``[0, r]``, as sparse attention would select."""
    row = np.arange(start, stop, dtype=np.int64)[:, None, None]
    cell = np.arange(shape.cells, dtype=np.int64).reshape(1, shape.layers, shape.top_k)
    return ((row * 7_919 + cell * 104_729 + shift) % (row + 1)).astype("<i4")


def _npy(rows: npt.NDArray[np.int32]) -> bytes:
    """A version 1.0 ``.npy`` file of ``rows``."""
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {rows.shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + rows.tobytes()
