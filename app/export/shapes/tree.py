"""A session as one row: a tree of its tokens, each of them once.

A *segment* is a run of one turn's tokens that the same rows have. Segments stand in `tokens` in depth-first order, so
that what continues a token stands behind it, up to the end of its subtree. A *leaf* is a row of the shape `turnlog`
without what it shares with others: `turnlog.unpack_tree` makes the rows again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from app.domain.events import is_number
from app.domain.samples import Array
from app.export import jsontext
from app.export.row import Columns, Fields, Routing, Row, RowImage, Unfit
from app.export.shapes import turnlog
from workers.reply import VersionSpan

OF_SESSION = (
    *("session_id", "run", "group_id", "attempt", "parent_session_id", "reward", "reward_components"),
    *("advantage", "metadata", "cursor", "rollout_id", "rollout_rows", "rollout_weight", "pinned", "note", "tags"),
    *("name", "generation"),
)
"""The `turnlog` row's fields that all rows of a session have alike."""

TOLD_ONCE = frozenset(
    {
        *OF_SESSION,
        *("tokens", "loss_mask", "sampled_mask", "logprobs", "weight_versions"),
        *("turns", "sampling", "messages", "images"),
        *("routed_experts", "row_start", "rows", "dtype", "shape", "indexer_topk"),
    }
)
"""What a leaf leaves out: it follows from the session, its segments, its turns and its `payloads`."""

PAYLOAD: Columns = {"data": "bytes", "rows": "int64", "dtype": "text", "shape": "[int64]"}

COLUMNS: Columns = {
    **{name: turnlog.COLUMNS[name] for name in OF_SESSION},
    "as_of_seq": "int64",
    "tokens": "[int32]",
    "position_ids": "[int64]",
    "loss_mask": "[uint8]",
    "sampled_mask": "[uint8]",
    "logprobs": "[float64]",
    "weight_versions": "[int64]",
    "weight_version_names": "[text]",
    "segment_starts": "[int64]",
    "segment_parents": "[int64]",
    "segment_turns": "[int64]",
    "segment_owners": "[int64]",
    "leaves": "json",
    "turns": "json",
    "routed_experts": PAYLOAD,
    "indexer_topk": PAYLOAD,
}


class _Turn(msgspec.Struct):
    """What the rows have of a turn: `span` and `tokens` of the row that has most of it, None if none has its tokens.

    `ends`: where its tokens end in some row. `lost`: the rows that have it in their loss, and where it ends there.
    """

    parent: int
    first_message: int
    messages: Sequence[bytes]
    images: Sequence[RowImage]
    span: Fields | None = None
    sampling: object = None
    tokens: Array | None = None
    logprobs: Array | None = None
    start: int = 0
    output_start: int = 0
    versions: Sequence[VersionSpan] = ()
    ends: set[int] = set()
    lost: list[tuple[int, int]] = []

    def told(self, number: int, *, images: bool) -> Fields:
        return {
            **({} if self.span is None else {**self.span, "sampling": self.sampling}),
            "turn": number,
            "parent": self.parent,
            "first_message": self.first_message,
            "messages": jsontext.array(self.messages),
            **({"images": self.images} if images else {}),
        }


class _Segment(msgspec.Struct, frozen=True, gc=False):
    """The tokens [start, end) of a turn, by their positions in a row; `parent` is a segment, −1 for none."""

    turn: int
    start: int
    end: int
    parent: int


class _PayloadRows:
    """A kind's rows, each once: a row of the session shares those that an earlier one has at the same token."""

    def __init__(self, inner: tuple[int, ...]) -> None:
        self.inner = inner
        self._parts: list[Array] = []
        self._rows = 0
        self._known: dict[tuple[int, int], list[tuple[int, Array]]] = {}

    def taken(self, routing: Routing, spans: Sequence[Any]) -> list[list[int]]:
        """The ranges of rows that are this payload's, in order."""
        ranges: list[list[int]] = []
        first, stop = routing.row_start, routing.row_start + len(routing.ids)
        for span in spans:
            at, end = max(span.start, first), min(span.end, stop)
            while at < end:
                begin, count = self._row(span.turn, at, routing.ids[at - first : end - first])
                if ranges and ranges[-1][1] == begin:
                    ranges[-1][1] += count
                else:
                    ranges.append([begin, begin + count])
                at += count
        return ranges

    def _row(self, turn: int, at: int, ids: Array) -> tuple[int, int]:
        """Where rows that begin so are, and how many of them; they are added where nothing is."""
        variants = self._known.setdefault((turn, at), [])
        for begin, known in variants:
            length = min(len(known), len(ids))
            if np.array_equal(known[:length], ids[:length]):
                return begin, length
        begin = self._rows
        variants.append((begin, ids.copy()))
        self._parts.append(variants[-1][1])
        self._rows += len(ids)
        return begin, len(ids)

    def fields(self) -> Fields:
        dtype = np.result_type(*self._parts) if self._parts else np.dtype(np.uint8)
        data = b"".join(part.astype(dtype.newbyteorder("<"), copy=False).tobytes() for part in self._parts)
        return {"data": data, "rows": self._rows, "dtype": dtype.name, "shape": [self._rows, *self.inner]}


class SessionTree:
    """Takes the rows of one session, one at a time, and keeps of each what no earlier one has."""

    def __init__(self) -> None:
        self._turns: dict[int, _Turn] = {}
        self._leaves: list[tuple[tuple[int, int], dict[str, Any]]] = []
        self._payloads: dict[str, _PayloadRows] = {}
        self._session: Fields = {}
        self._has_images = False

    def __len__(self) -> int:
        """The rows so far."""
        return len(self._leaves)

    def add(self, row: Row) -> None:
        """Raises Unfit, and what reading its content raises; then nothing of it is kept."""
        shaped: Any = turnlog.fields(row)
        messages = list(row.messages)
        images = None if row.images is None else list(row.images)
        sample = row.sample
        inner = {kind: payload.ids.shape[1:] for kind, payload in row.routing.items() if payload is not None}
        if any(kind in self._payloads and self._payloads[kind].inner != shape for kind, shape in inner.items()):
            raise Unfit("its replay payloads have another shape than those of the session's earlier rows")
        for turn in row.session.message_chain(sample.turns[-1].turn):
            if turn.number not in self._turns:
                own = slice(turn.base_messages, turn.message_count)
                brought = [image for image in images or () if image.turn == turn.number]
                self._turns[turn.number] = _Turn(turn.parent, turn.base_messages, messages[own], brought)
        self._add_tokens(row, shaped)
        leaf = {name: value for name, value in shaped.items() if name not in TOLD_ONCE}
        leaf["turn"] = sample.turns[-1].turn
        leaf["loss_turns"] = [span.turn for span in sample.turns if span.turn in sample.in_loss]
        if row.replay:
            leaf["payloads"] = {kind: self._payload(kind, row, payload) for kind, payload in row.routing.items()}
        self._leaves.append(((sample.turns[-1].turn, sample.turns[-1].end), leaf))
        self._session = {name: shaped[name] for name in OF_SESSION}
        self._has_images |= images is not None

    def _add_tokens(self, row: Row, shaped: Any) -> None:
        sample, number = row.sample, len(self._leaves)
        begins = [span.start for span in sample.version_spans]
        for span, told, sampling in zip(sample.turns, shaped["turns"], shaped["sampling"], strict=True):
            turn = self._turns.get(span.turn)
            if turn is None:
                committed = row.session.turn(span.turn)
                turn = self._turns[span.turn] = _Turn(committed.parent, committed.base_messages, (), ())
            if turn.tokens is None or len(turn.tokens) < span.end - span.start:
                turn.span, turn.sampling = told, sampling
                turn.start, turn.output_start = span.start, span.output_start
                turn.tokens = sample.tokens[span.start : span.end].copy()
                turn.logprobs = sample.logprobs[span.start : span.end].copy()
                places = slice(bisect_left(begins, span.output_start), bisect_left(begins, span.end))
                turn.versions = sample.version_spans[places]
            turn.ends.add(span.end)
            if span.turn in sample.in_loss:
                turn.lost.append((number, span.end))

    def _payload(self, kind: str, row: Row, routing: Routing | None) -> Fields | None:
        if routing is None:
            return None
        rows = self._payloads.setdefault(kind, _PayloadRows(routing.ids.shape[1:]))
        ranges = rows.taken(routing, row.sample.turns)
        return {"row_start": routing.row_start, "dtype": routing.ids.dtype.name, "ranges": ranges}

    def fields(self, cursor: str) -> dict[str, Any]:
        """`cursor` gives what comes after the session."""
        segments, last = self._segments()
        names = list(dict.fromkeys(span.version for segment in segments for span in self._turns[segment.turn].versions))
        is_numeric = all(map(is_number, names))
        numbers = {name: int(name) if is_numeric else place for place, name in enumerate(names)}
        parts: list[tuple[Array, ...]] = []
        owners: list[int] = []
        for segment in segments:
            turn = self._turns[segment.turn]
            owners.append(next((leaf for leaf, end in turn.lost if end >= segment.end), -1))
            parts.append(_columns(segment, turn, numbers, in_loss=owners[-1] >= 0))
        tokens, positions, loss, sampled, logprobs, versions = (
            np.concatenate([np.zeros(0, dtype), *(part[place] for part in parts)])
            for place, dtype in enumerate(("<i4", "<i8", "u1", "u1", "<f8", "<i8"))
        )
        lengths = [segment.end - segment.start for segment in segments]
        return {
            **self._session,
            "cursor": cursor,
            "as_of_seq": max(leaf["as_of_seq"] for _, leaf in self._leaves),
            "tokens": tokens,
            "position_ids": positions,
            "loss_mask": loss,
            "sampled_mask": sampled,
            "logprobs": logprobs,
            "weight_versions": versions,
            "weight_version_names": [] if is_numeric else names,
            "segment_starts": np.cumsum([0, *lengths], dtype=np.int64)[:-1],
            "segment_parents": np.array([segment.parent for segment in segments], np.int64),
            "segment_turns": np.array([segment.turn for segment in segments], np.int64),
            "segment_owners": np.array(owners, np.int64),
            "leaves": [{**leaf, "leaf_segment": last[end]} for end, leaf in self._leaves],
            "turns": [turn.told(number, images=self._has_images) for number, turn in sorted(self._turns.items())],
            **{kind: rows.fields() for kind, rows in self._payloads.items()},
        }

    def _segments(self) -> tuple[list[_Segment], dict[tuple[int, int], int]]:
        """The segments in depth-first order, and which one ends where a turn does in some row.

        Where a turn has no token in a row, that is the segment before it.
        """
        below: dict[tuple[int, int], list[int]] = {}
        for number, turn in sorted(self._turns.items(), reverse=True):
            if turn.span is not None:
                below.setdefault((turn.parent, turn.start) if turn.start else (0, 0), []).append(number)
        segments: list[_Segment] = []
        last: dict[tuple[int, int], int] = {}
        waiting = [(number, 0, -1) for number in below.get((0, 0), ())]
        while waiting:
            number, start, parent = waiting.pop()
            turn = self._turns[number]
            end = start if start == turn.start in turn.ends else min(end for end in turn.ends if end > start)
            if (number, end) in last:
                end = min(end for end in turn.ends if end > start)
            if end > start:
                segments.append(_Segment(number, start, end, parent))
                parent = len(segments) - 1
            last[number, end] = parent
            if end < max(turn.ends):
                waiting.append((number, end, parent))
            waiting += [(child, end, parent) for child in below.get((number, end), ())]
        return segments, last


def _columns(segment: _Segment, turn: _Turn, numbers: Mapping[str, int], *, in_loss: bool) -> tuple[Array, ...]:
    """A segment's tokens, positions, both masks, logprobs and weight versions."""
    assert turn.tokens is not None
    assert turn.logprobs is not None
    start, end = segment.start, segment.end
    own = slice(start - turn.start, end - turn.start)
    positions = np.arange(start, end, dtype=np.int64)
    sampled = (positions >= turn.output_start).astype(np.uint8)
    versions = np.full(end - start, -1, np.int64)
    for span in turn.versions:
        versions[max(span.start - start, 0) : max(span.end - start, 0)] = numbers[span.version]
    loss = sampled if in_loss else np.zeros_like(sampled)
    return turn.tokens[own], positions, loss, sampled, turn.logprobs[own], versions
