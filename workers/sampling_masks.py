"""Sampling masks: of each sampled token the ids that top-k, top-p and min-p left to draw it from.

Row r is about token r + 1, whose logits a model gives at position r; it is empty where no engine has sampled that token
in this sequence. An engine tells only its own output's rows. A payload holds all rows of its sequence, as those of
other kinds do: the parent's chunks, and a new one with what follows. Where the turn's prompt trims the parent's last
tokens, the new chunk begins before the parent's end; a chunk's rows count up to where the next one begins.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from workers import codec
from workers.codec import Cut
from workers.parse_json import Rejected
from workers.payloads import (
    CHUNK_BYTES,
    DTYPES,
    NUMBER,
    Chunk,
    Ids,
    NewChunk,
    PayloadSpec,
    StoredPayload,
    minimal,
    narrowed,
    numbers,
    pieces,
    raw_of,
)

KIND = "sampling_mask"

LENGTH_BYTES = 4
"""A chunk begins with its rows' lengths as little-endian uint32; all their ids follow in the chunk's type."""

_SETS = msgspec.json.Decoder(list[list[NUMBER]])
_DIGITS = b"0123456789"


@dataclass(frozen=True, slots=True)
class Masks:
    """Row r has the ids [offsets[r], offsets[r + 1]); `offsets` are int64, one more than there are rows."""

    offsets: Ids
    ids: Ids

    @classmethod
    def of(cls, lengths: Ids, ids: Ids) -> Masks:
        offsets = np.zeros(len(lengths) + 1, "<i8")
        np.cumsum(lengths, out=offsets[1:])
        return cls(offsets, ids)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Ids:
        return np.diff(self.offsets)

    def part(self, first: int, stop: int) -> Masks:
        offsets = self.offsets[first : stop + 1]
        return Masks(offsets - offsets[0], self.ids[offsets[0] : offsets[-1]])

    def with_singletons(self, tokens: Ids) -> Masks:
        """With the token itself in each row that has no id."""
        lengths, is_bare = self.lengths, self.lengths == 0
        ids = np.insert(self.ids.astype(np.int32), self.offsets[:-1][is_bare], tokens[is_bare])
        return Masks.of(np.maximum(lengths, 1), ids)


def read(
    text: memoryview, spec: PayloadSpec, base: int, prompt_tokens: int, output_ids: bytes
) -> tuple[StoredPayload, Cut]:
    """Validate a payload's JSON value, a list of ids for each token of the output, and its spelling.

    The prompt begins with `base` tokens of the parent. Raises Rejected.
    """
    output = np.frombuffer(output_ids, "<i4")
    lengths, ids, separator = _sets(text)
    if len(lengths) != len(output):
        raise Rejected(f"{KIND} has {len(lengths)} sets for {len(output)} output tokens")
    if len(output) and not prompt_tokens:
        raise Rejected(f"{KIND} of a reply without a prompt")
    if len(output) and not (lengths.all() and _holds_each(lengths, ids, output)):
        raise Rejected(f"{KIND} has a set without the token that was sampled from it")
    sent = max(prompt_tokens - 1, 0)
    at = start = max(base - 1, 0)
    shared = 0
    if base and spec.parent is not None:
        start = spec.parent.start
        shared = sum(chunk.start < at for chunk in spec.parent.chunks)
    rows = Masks.of(np.concatenate((np.zeros(sent - at, lengths.dtype), lengths)), ids)
    cut = Cut(KIND, 0, "text", len(text)) if separator is None else Cut(KIND, 0, "sets", separator=separator)
    return StoredPayload(KIND, start, at + len(rows), sent, (), shared, _chunks(rows, at)), cut


def _holds_each(lengths: Ids, ids: Ids, output: Ids) -> bool:
    is_token = ids == np.repeat(output, lengths)
    starts = np.cumsum(lengths) - lengths
    return bool(np.logical_or.reduceat(is_token, starts).all())


def _sets(text: memoryview) -> tuple[Ids, Ids, str | None]:
    """The sets' lengths, their ids, and what stands between items; None if the text cannot be restored."""
    outline = b"".join(piece.translate(None, _DIGITS) for piece in pieces(text))
    separator = ", " if b", " in outline else ","
    bare = outline.replace(b", ", b",") if separator == ", " else outline
    parts = bare[2:-2].split(b"],[")
    is_regular = (
        bare[:2] == b"[["
        and bare[-2:] == b"]]"
        and bare.count(b"[") == bare.count(b"]") == len(parts) + 1
        and not bare.translate(None, b"[],")
        and (separator == "," or outline.count(b",") == outline.count(b", "))
    )
    if is_regular:
        lengths = np.array([len(part) + 1 for part in parts], np.int64)
        ids, is_exact = numbers(text, KIND)
        if ids.size == lengths.sum():
            return lengths, ids, separator if is_exact else None
    try:
        sets = _SETS.decode(text)
    except msgspec.MsgspecError as error:
        raise Rejected(f"{KIND} must be lists of integers, one a token") from error
    flat = np.array([token for row in sets for token in row], np.int64)
    return np.array([len(row) for row in sets], np.int64), narrowed(flat, KIND), None


def _chunks(rows: Masks, start: int) -> list[NewChunk]:
    upto = LENGTH_BYTES * np.arange(len(rows) + 1) + rows.ids.itemsize * rows.offsets
    ends = [0]
    while ends[-1] < len(rows):
        fitting = int(np.searchsorted(upto, upto[ends[-1]] + CHUNK_BYTES, "right")) - 1
        ends.append(max(fitting, ends[-1] + 1))
    new: list[NewChunk] = []
    for first, stop in pairwise(ends):
        part = rows.part(first, stop)
        ids = minimal(part.ids)
        raw = part.lengths.astype("<u4").tobytes() + ids.tobytes()
        digest = hashlib.sha256(raw).hexdigest()[:32]
        chunk = Chunk(start + first, len(part), ids.dtype.name, len(raw), digest)
        new.append(NewChunk(chunk, codec.compress(raw)))
    return new


def load(chunk: Chunk, frame: bytes | None) -> Masks:
    """A stored chunk's rows. Raises CorruptContent if they are missing or changed."""
    raw = raw_of(chunk, frame)
    lengths = np.frombuffer(raw, "<u4", chunk.rows)
    return Masks.of(lengths, np.frombuffer(raw, DTYPES[chunk.dtype], offset=LENGTH_BYTES * chunk.rows))


def join(parts: Sequence[Masks]) -> Masks:
    """The rows of several chunks, their ids in the smallest type that holds them all."""
    if not parts:
        return Masks(np.zeros(1, "<i8"), np.zeros(0, "|u1"))
    ids = minimal(np.concatenate([part.ids for part in parts]))
    return Masks.of(np.concatenate([part.lengths for part in parts]), ids)


def render(cut: Cut, rows: Masks) -> bytes:
    """The rows as a JSON value in the engine's spelling."""
    ids, ends = rows.ids.tolist(), rows.offsets.tolist()
    text = json.dumps([ids[first:stop] for first, stop in pairwise(ends)])
    return (text if cut.separator == ", " else text.replace(" ", "")).encode()
