"""Replay payloads: from an engine's text to chunks of rows, and back.

    text ─▶ ids, range-checked and narrowed ─▶ rows ─▶ the parent's chunks where equal, new ones for the rest

A payload of N tokens has a row for each but the last. Its first rows are usually those of the turn before: if so
(compared by hash, never assumed), that turn's chunks are shared, and only new rows are stored."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64

from workers import codec
from workers.codec import CorruptContent, Cut
from workers.parse_json import Rejected
from workers.parse_prompt import MAX_TOKEN_ID

Ids = npt.NDArray[Any]
"""Integer ids, one-dimensional or as [rows, ids per row]."""

LOWEST = {"routed_experts": 0, "indexer_topk": -1, "sampling_mask": 0}
"""Lowest id: an expert's number; a position, or -1 if there were fewer positions than requested; a token's id."""

DTYPES = {"uint8": "|u1", "uint16": "<u2", "int16": "<i2", "int32": "<i4"}
"""Storage types of chunks, in numpy's notation: the first that holds all of a chunk's ids."""

CHUNK_BYTES = 1 << 20
"""Maximum raw size of a chunk: small enough to be written between other sessions' turns."""

MERGE_BYTES = 16 << 10
"""Small chunks are merged up to this size: a session of many short turns has few chunks and rewrites little."""

PIECE = 3 << 20
"""Base64 characters decoded at a time: most payloads are shorter. A multiple of 16, so that each piece holds whole
int32 ids."""

LISTS_PIECE = 768 << 10
"""Characters of lists read at a time: each number becomes an object."""

_NPY_MAGIC = b"\x93NUMPY"
_NPY_VERSIONS = (b"\x01\x00", b"\x02\x00", b"\x03\x00")
_NPY_HEAD = re.compile(
    rb"\{'descr': '([<|][iu][1248])', 'fortran_order': False, 'shape': \((\d{1,10}(?:, \d{1,10})*),?\), \} *\n"
)
NUMBER = Annotated[int, msgspec.Meta(ge=-1, le=MAX_TOKEN_ID)]
_FLAT = msgspec.json.Decoder(list[NUMBER])
_NESTED = (_FLAT, msgspec.json.Decoder(list[list[NUMBER]]), msgspec.json.Decoder(list[list[list[NUMBER]]]))


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Rows [start, start + rows) as raw ids of `dtype`: size in bytes, and 128 bits of their SHA-256 as hex."""

    start: int
    rows: int
    dtype: str
    size: int
    hash: str


class NewChunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk and its bytes, as one compressed frame."""

    chunk: Chunk
    frame: bytes


class Parent(msgspec.Struct, frozen=True, array_like=True):
    """The previous turn's payload: rows [start, stop) of `row_ids` ids each, in these chunks."""

    start: int
    stop: int
    row_ids: int
    chunks: list[Chunk]


class PayloadSpec(msgspec.Struct, frozen=True, array_like=True):
    """What was requested of a kind: rows from `start` on. `shape` is a row's, if known.

    `own`: where the turn continues all the parent's tokens, its own rows begin here. They get chunks of their own, as
    they may be kept longer than the others; None: chunks are as few as can be.
    """

    kind: str
    required: bool = False
    start: int = 0
    shape: tuple[int, ...] | None = None
    parent: Parent | None = None
    own: int | None = None


class StoredPayload(msgspec.Struct, frozen=True, array_like=True):
    """A payload as it is stored: rows [start, stop), of which the engine sent those from `sent` on.

    Its chunks are the parent's first `shared` ones, then `new`.
    """

    kind: str
    start: int
    stop: int
    sent: int
    shape: tuple[int, ...]
    shared: int
    new: list[NewChunk]


def read(text: memoryview, spec: PayloadSpec, base: int, tokens: int, *, npy: bool) -> tuple[StoredPayload, Cut]:
    """Validate a payload's JSON value for a reply of `tokens` tokens in total, of which `base` are the parent's first;
    also returns its spelling.

    A string is base64, of a .npy file if the engine's dialect says so, else of int32. Raises Rejected.
    """
    rows = max(tokens - 1 - spec.start, 0)
    first = bytes(text[:1])
    if first == b'"':
        ids, dims, cut = _from_base64(text[1:-1], spec.kind, npy)
    elif first == b"[":
        ids, dims, cut = _from_lists(text, spec.kind, rows)
    else:
        raise Rejected(f"{spec.kind} must be base64 or nested lists")
    shape = _shape(spec, ids.size, dims, rows)
    table = ids.reshape(rows, math.prod(shape)) if rows else ids.reshape(0, 0)
    is_other_model = rows and spec.parent is not None and spec.parent.row_ids != math.prod(shape)
    if is_other_model or (spec.start and not base):
        # Without `base` the prompt drifted: the known rows belong to other tokens.
        spec = msgspec.structs.replace(spec, parent=None)
    return _stored(spec, base, table, shape), cut or Cut(spec.kind, 0, "text", len(text))


def _shape(spec: PayloadSpec, ids: int, dims: tuple[int, ...] | None, rows: int) -> tuple[int, ...]:
    """A row's shape. `dims` are the payload's own dimensions, rows first, if it has any."""
    if dims is not None and (dims[0] != rows or math.prod(dims) != ids):
        raise Rejected(f"{spec.kind} has {ids} ids of shape {dims} where {rows} rows belong to the tokens")
    if rows == 0:
        if ids:
            raise Rejected(f"{spec.kind} has {ids} ids where no row belongs to the tokens")
        return spec.shape or ()
    if ids == 0 or ids % rows:
        raise Rejected(f"{spec.kind} has {ids} ids, which make no {rows} rows")
    width = ids // rows
    own = dims[1:] if dims is not None else ()
    if spec.shape is not None and (math.prod(spec.shape) != width or (len(own) > 1 and own != spec.shape)):
        raise Rejected(f"{spec.kind} has {width} ids a row, of shape {list(own)}, where {list(spec.shape)} is expected")
    return spec.shape or own or (width,)


def _from_base64(text: memoryview, kind: str, npy: bool) -> tuple[Ids, tuple[int, ...] | None, Cut | None]:
    """The ids, their shape if the text tells it, and the spelling."""
    parts: list[Ids] = []
    head, dtype, dims = b"", "<i4", None
    carry = raw = b""
    for at in range(0, len(text), PIECE):
        last = at + PIECE >= len(text)
        try:
            raw = pybase64.b64decode(text[at : at + PIECE], validate=True)
        except ValueError as error:
            raise Rejected(f"{kind} is not base64") from error
        if not last and len(raw) != PIECE * 3 // 4:
            raise Rejected(f"{kind} is not base64: it has padding before its end")
        if at == 0 and raw.startswith(_NPY_MAGIC) and not npy:
            raise Rejected(f"{kind} is a .npy file where int32 was expected")
        if at == 0 and npy:
            head, dtype, dims = _npy_head(raw, kind)
            carry, body = b"", raw[len(head) :]
        else:
            body = carry + raw if carry else raw
        whole = len(body) - len(body) % np.dtype(dtype).itemsize
        carry = body[whole:]
        parts.append(narrowed(np.frombuffer(body, dtype, whole // np.dtype(dtype).itemsize), kind))
    if carry:
        raise Rejected(f"{kind} is not a whole number of ids")
    ending = len(raw) % 3 or 3
    exact = not len(text) or pybase64.b64encode(raw[-ending:]) == bytes(text[-4:])
    cut = Cut(kind, 0, "npy" if dims else "base64", head=head, dtype=dtype) if exact else None
    return _joined(parts), dims, cut


def _npy_head(raw: bytes, kind: str) -> tuple[bytes, str, tuple[int, ...]]:
    """Header, dtype and shape of a .npy file; only headers that numpy itself writes for integer arrays."""
    if not raw.startswith(_NPY_MAGIC) or raw[6:8] not in _NPY_VERSIONS:
        raise Rejected(f"{kind} is not base64 of a .npy file")
    prefix = 10 if raw[6:7] == b"\x01" else 12
    length = int.from_bytes(raw[8:prefix], "little")
    head = raw[: prefix + length]
    match = _NPY_HEAD.fullmatch(head, prefix)
    if match is None:
        raise Rejected(f"{kind} is a .npy file, but not of integers in C order")
    return head, match[1].decode(), tuple(int(size) for size in match[2].replace(b" ", b"").split(b",") if size)


def _from_lists(text: memoryview, kind: str, rows: int) -> tuple[Ids, tuple[int, ...] | None, Cut | None]:
    """As `_from_base64`. Only evenly spaced and nested lists can be restored byte for byte."""
    first = bytes(text[:LISTS_PIECE])
    separator = ", " if b", " in first else ","
    dims = _dims(first, separator.encode())
    outline = b"".join(piece.translate(None, b"0123456789-") for piece in pieces(text))
    items = rows if dims else outline.count(b",") + (len(text) > 2)
    expected = items * math.prod(dims)
    if 2 * expected <= len(text) and outline == _outline((items, *dims), separator.encode()):
        del outline
        ids, exact = numbers(text, kind)
        if ids.size != expected:
            raise Rejected(f"{kind} holds something else than ids")
        cut = Cut(kind, 0, "lists", dims=dims, separator=separator) if exact else None
        return ids, (rows, *dims) if dims else None, cut
    return _from_odd_lists(bytes(text), kind)


def pieces(text: memoryview) -> Iterator[bytes]:
    return (bytes(text[at : at + LISTS_PIECE]) for at in range(0, len(text), LISTS_PIECE))


def numbers(text: memoryview, kind: str) -> tuple[Ids, bool]:
    """All numbers in the lists, a piece at a time; can each be restored exactly?"""
    parts: list[Ids] = []
    exact, carry = True, b""
    for piece in pieces(text):
        flat = carry + piece.translate(None, b"[] ")
        end = flat.rfind(b",")
        if end >= 0:
            exact = exact and b"-0" not in flat[:end]
            parts.append(narrowed(np.array(_decoded(flat[:end], kind), np.int64), kind))
        carry = flat[end + 1 :]
    parts.append(narrowed(np.array(_decoded(carry, kind), np.int64), kind))
    return _joined(parts), exact and b"-0" not in carry


def _decoded(numbers: bytes, kind: str) -> Any:
    try:
        return _FLAT.decode(b"[" + numbers + b"]")
    except msgspec.MsgspecError as error:
        raise Rejected(f"{kind} holds something else than ids") from error


def _from_odd_lists(text: bytes, kind: str) -> tuple[Ids, tuple[int, ...] | None, None]:
    for decoder in _NESTED:
        try:
            ids = np.array(decoder.decode(text), np.int64)
        except ValueError:
            continue
        return narrowed(ids.reshape(-1), kind), ids.shape if ids.ndim > 1 else None, None
    raise Rejected(f"{kind} must be a list of integers, or lists of equal length of them, at most three deep")


def _dims(text: bytes, separator: bytes) -> tuple[int, ...]:
    """The shape of a row, from the first one: (), (ids,) or (layers, ids)."""
    ids = text[: text.find(b"]")].count(separator) + 1
    if text.startswith(b"[[["):
        return text[2 : text.find(b"]]")].count(b"["), ids
    return (ids,) if text.startswith(b"[[") else ()


def _outline(shape: tuple[int, ...], separator: bytes) -> bytes:
    """Nested lists of this shape without their numbers."""
    text = b""
    for size in reversed(shape):
        text = b"[" + separator.join([text] * size) + b"]"
    return text


def narrowed(ids: Ids, kind: str) -> Ids:
    """The ids in the smallest of `DTYPES`. Raises Rejected for one that is out of range."""
    if ids.size == 0:
        return ids.astype("|u1")
    low, high = int(ids.min()), int(ids.max())
    if low < LOWEST[kind] or high > MAX_TOKEN_ID:
        raise Rejected(f"{kind} holds an id out of range")
    return ids.astype(_smallest(low, high), copy=False)


def _smallest(low: int, high: int) -> str:
    if low >= 0:
        return "|u1" if high < 1 << 8 else "<u2" if high < 1 << 16 else "<i4"
    return "<i2" if high < 1 << 15 else "<i4"


def _joined(parts: Sequence[Ids]) -> Ids:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, "|u1")


def _stored(spec: PayloadSpec, base: int, rows: Ids, shape: tuple[int, ...]) -> StoredPayload:
    """Split `rows`, which begin with row `spec.start`, into the parent's chunks and new ones."""
    start, parent = spec.start, spec.parent
    stop = start + len(rows)
    shared = 0
    if parent is not None and start and parent.stop == start:
        start, shared = parent.start, len(parent.chunks)
    elif parent is not None and parent.start == start and len(rows):
        shared = _shared(rows, start, parent.chunks)
    known = [] if parent is None else parent.chunks[:shared]
    at = known[-1].start + known[-1].rows if known else start
    own = at if spec.own is None else min(max(at, min(base, spec.own)), stop)
    if spec.own is None:
        at = own = _merged(known, at, spec.start, (stop - at) * rows.itemsize * rows.shape[1])
    new = [] if at == stop else _chunks(rows[at - spec.start : own - spec.start], at)
    new += [] if own == stop else _chunks(rows[own - spec.start :], own)
    return StoredPayload(spec.kind, start, stop, spec.start, shape, len(known), new)


def _shared(rows: Ids, start: int, chunks: Sequence[Chunk]) -> int:
    """How many of the chunks hold exactly these rows."""
    for count, chunk in enumerate(chunks):
        at = chunk.start - start
        part = minimal(rows[at : at + chunk.rows])
        if len(part) < chunk.rows or part.dtype.name != chunk.dtype or _digest(part) != chunk.hash:
            return count
    return len(chunks)


def _merged(known: list[Chunk], own: int, sent: int, size: int) -> int:
    """The first row of the new chunks, after known chunks that are no larger are merged into them."""
    while known and known[-1].start >= sent and known[-1].size <= size <= MERGE_BYTES - known[-1].size:
        last = known.pop()
        own, size = last.start, size + last.size
    return own


def _chunks(rows: Ids, start: int) -> list[NewChunk]:
    step = max(1, CHUNK_BYTES // (rows.itemsize * rows.shape[1]))
    new: list[NewChunk] = []
    for at in range(0, len(rows), step):
        part = minimal(rows[at : at + step])
        chunk = Chunk(start + at, len(part), part.dtype.name, part.nbytes, _digest(part))
        new.append(NewChunk(chunk, codec.compress(part.tobytes())))
    return new


def minimal(rows: Ids) -> Ids:
    """The same rows in the smallest type that holds them, so that equal rows have equal bytes."""
    if rows.dtype.itemsize == 1 or rows.size == 0:
        return rows
    return rows.astype(_smallest(int(rows.min()), int(rows.max())), copy=False)


def _digest(rows: Ids) -> str:
    return hashlib.sha256(rows.data).hexdigest()[:32]


def raw_of(chunk: Chunk, frame: bytes | None) -> bytes:
    """A stored chunk's bytes. Raises CorruptContent if they are missing or changed."""
    raw = codec.decompress(frame, chunk.size)
    if len(raw) != chunk.size or hashlib.sha256(raw).hexdigest()[:32] != chunk.hash:
        raise CorruptContent(f"the rows from {chunk.start} on differ from those that were stored")
    return raw


def load(chunk: Chunk, frame: bytes | None) -> Ids:
    """A stored chunk's rows. Raises CorruptContent if they are missing or changed."""
    return np.frombuffer(raw_of(chunk, frame), DTYPES[chunk.dtype]).reshape(chunk.rows, -1)


def join(chunks: Sequence[Ids]) -> Ids:
    """Rows of several chunks as one array, in the smallest type that holds them all."""
    return minimal(_joined(chunks))


def render(cut: Cut, rows: Ids) -> bytes:
    """The rows as a JSON value in the engine's spelling."""
    if cut.form == "lists":
        text = str(rows.reshape(-1, *cut.dims).tolist() if cut.dims else rows.reshape(-1).tolist())
        return (text if cut.separator == ", " else text.replace(" ", "")).encode()
    return b'"' + pybase64.b64encode(cut.head + rows.astype(cut.dtype).tobytes()) + b'"'
