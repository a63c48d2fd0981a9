"""The stored form of a turn's ids and logprobs: narrow numbers in a row, ready for numpy.

zstd takes 2.5 ns a byte to unpack them, since it finds a match every few bytes and little to save: token ids and the
mantissas of logprobs are close to random. Narrowed they take less room than it leaves of int32 and float64 (a
vocabulary of up to 65,536), or some percent more (a larger one), and a quarter of the time. A long list that repeats
itself, as a prompt of logs, is compressed as well.

    kind, bytes of an id (2, 3, 4), bytes of a logprob (4, 8), number of new prompt ids, output ids and logprobs,
    CRC-32 of all before and of the numbers │ prompt ids │ output ids │ logprobs

All little-endian. A logprob has four bytes where they hold all logprobs of the turn exactly: engines compute in
float32.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

PLAIN, COMPRESSED = b"\x03", b"\x04"
"""First bytes; a zstd frame begins differently."""

_HEAD = struct.Struct("<cBBIII")
_CHECK = struct.Struct("<I")
START = _HEAD.size + _CHECK.size

LONG = 16 << 10
"""Bytes of numbers that are worth a try with zstd."""

_ID_WIDTHS = (2, 3, 4)
_LOGPROB_TYPES: Mapping[int, Any] = {4: np.dtype("<f4"), 8: np.dtype("<f8")}

Array = npt.NDArray[Any]


class NotFacts(Exception):
    """Bytes that are no turn's numbers, and why."""


def pack(suffix_ids: bytes, output_ids: bytes, logprobs: bytes, compress: Callable[[bytes], bytes]) -> bytes | None:
    """Ids are int32, logprobs float64; None if they are something else, as a negative id."""
    if len(suffix_ids) % 4 or len(output_ids) % 4 or len(logprobs) % 8:
        return None
    ids, scores = np.frombuffer(suffix_ids + output_ids, "<i4"), np.frombuffer(logprobs, "<f8")
    if ids.size and ids.min() < 0:
        return None
    most = int(ids.max()) if ids.size else 0
    width = 2 if most < 1 << 16 else 3 if most < 1 << 24 else 4
    scores = _narrowed(scores)
    body = _narrow_ids(ids, width) + scores.tobytes()
    kind = PLAIN
    head = (width, scores.itemsize, len(suffix_ids) // 4, len(output_ids) // 4, scores.size)
    if len(body) >= LONG and len(packed := compress(body)) < len(body) * 3 // 4:
        kind, body = COMPRESSED, packed
    begin = _HEAD.pack(kind, *head)
    return begin + _CHECK.pack(zlib.crc32(body, zlib.crc32(begin))) + body


def unpack(
    frame: bytes, decompress: Callable[[bytes, int], bytes], *, is_checked: bool = False
) -> tuple[bytes, bytes, bytes]:
    """What `pack` was given. `is_checked`: the frame's hash has been compared, so its CRC need not be.

    Raises NotFacts, and what `decompress(bytes, most)` raises.
    """
    if len(frame) < START:
        raise NotFacts(f"{len(frame)} bytes")
    kind, width, score_width, suffix, output, scores = _HEAD.unpack_from(frame)
    if not is_checked:
        (check,) = _CHECK.unpack_from(frame, _HEAD.size)
        if zlib.crc32(memoryview(frame)[START:], zlib.crc32(frame[: _HEAD.size])) != check:
            raise NotFacts("the checksum differs")
    count = suffix + output
    size = count * width + scores * score_width
    at = START
    if kind == COMPRESSED:
        frame, at = decompress(frame[START:], size), 0
    if width not in _ID_WIDTHS or score_width not in _LOGPROB_TYPES or len(frame) - at != size:
        raise NotFacts(f"{len(frame) - at} bytes for {count} ids and {scores} logprobs")
    ids = _wide_ids(frame, width, count, at)
    found = np.frombuffer(frame, _LOGPROB_TYPES[score_width], scores, at + count * width)
    return ids[: 4 * suffix], ids[4 * suffix :], found.astype("<f8").tobytes()


def _narrowed(scores: Array) -> Array:
    """As float32 if that changes no bit."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = scores.astype("<f4")
    return narrow if narrow.astype("<f8").tobytes() == scores.tobytes() else scores


def _narrow_ids(ids: Array, width: int) -> bytes:
    if width == 3:
        return ids.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    return (ids.astype("<u2") if width == 2 else ids).tobytes()


def _wide_ids(frame: bytes, width: int, count: int, at: int) -> bytes:
    if width == 3:
        ids = np.zeros((count, 4), np.uint8)
        ids[:, :3] = np.frombuffer(frame, np.uint8, 3 * count, at).reshape(-1, 3)
        return ids.tobytes()
    if width == 2:
        return np.frombuffer(frame, "<u2", count, at).astype("<i4").tobytes()
    return frame[at : at + 4 * count]
