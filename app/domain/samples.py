"""What a trainer reads: one sample per leaf of a session's tokens, from the facts of its turns.

A sample is a run of turns in which every prompt continues the previous tokens exactly, except for the trailing tokens
that its turn trimmed. Nothing is guessed or padded, and only a limit cuts a sample. A prompt that did not continue them
began a new branch when it was committed. In a linear session a sample is a segment of its live path.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from app.domain.branches import BranchRow, Place, place_of
from app.domain.events import LimitName, TurnCommitted, is_number
from app.domain.session import Session
from workers.codec import TOKEN_BYTES
from workers.reply import Part, Speculative, VersionSpan

Status = Literal["completed", "truncated", "aborted"]

Truncate = Literal["turn", "token"]
"""Where `max_seq_len` cuts: after the last turn that fits whole, or inside the output of the first that does not.

miles' session server cuts inside the turn: dropping overlong turns would bias training against long answers.
"""

RoutingOf = Literal["newest", "sampled"]
"""Which turn's row a token has, where engines gave it several: the newest's, or that of the turn that sampled it."""

Stale = Literal["drop", "mask", "keep"]
"""What becomes of tokens that older weights than wanted sampled: their session is left out, they leave the loss, or
the row only says how old it is."""

Array = npt.NDArray[Any]

LOGPROB_BYTES = 8
"""Bytes of a stored logprob."""


class TurnTokens(msgspec.Struct, frozen=True, gc=False):
    """One turn's own tokens: new prompt ids and output ids (int32), output logprobs (float64)."""

    event: TurnCommitted
    suffix_ids: bytes
    output_ids: bytes
    logprobs: bytes


class TurnSpan(msgspec.Struct, frozen=True, gc=False):
    """The place of turn `turn` in the sample: its new prompt [start, output_start), its output [output_start, end).

    `engine` sampled it, or the last of its `parts`, whose positions are in the sample. `dispatched` is the weight
    version known at the first dispatch, `adapter` the turn's adapter. `cached_tokens` and `speculative` are as in
    `TurnCommitted`.
    """

    turn: int
    start: int
    output_start: int
    end: int
    finish_reason: str | None
    engine: str
    dispatched: str | None
    adapter: str | None
    parts: Sequence[Part]
    cached_tokens: int | None = None
    speculative: Speculative | None = None


class Sample(msgspec.Struct, frozen=True, gc=False):
    """T tokens (int32) with, for each, its masks (uint8), logprob (float64, 0.0 where not sampled) and weight version.

    `weight_versions` (int64) holds numbers where every version of the sample is one, else indices into
    `weight_version_names`; −1 where not sampled. `version_spans` are the same as the engines' own names.
    `prompt_length` counts the tokens before the first sampled one. `status` and `last_status` are the segment's.
    `branch` is its leaf's, `place` where that begins, `agent_id` who sent the leaf's request, `in_loss` the turns that
    it has in its loss, cut ones too. `limit` is the session's limit at which it ended.
    """

    segment: int
    cause: str | None
    parent_turn: int
    branch: int
    place: Place
    agent_id: str | None
    in_loss: Collection[int]
    tokens: Array
    loss_mask: Array
    sampled_mask: Array
    logprobs: Array
    weight_versions: Array
    weight_version_names: Sequence[str]
    version_spans: Sequence[VersionSpan]
    prompt_length: int
    response_length: int
    status: Status
    last_status: Status
    turns: Sequence[TurnSpan]
    limit: LimitName | None = None

    @property
    def regressed(self) -> bool:
        """Did a numeric weight version decrease from one sampled token to a later one?"""
        numbers = [int(span.version) for span in self.version_spans if is_number(span.version)]
        return any(later < earlier for earlier, later in pairwise(numbers))


class Age(msgspec.Struct, frozen=True):
    """How old the tokens are that a row has in its loss, before any was masked for its age.

    `staleness`: how many weight versions the oldest is behind, None where that of a token is not known: its version is
    no number, or nobody knows the current one. `stale_tokens`: how many tokens are further behind than wanted, or of
    unknown age; None where nothing is wanted.
    """

    staleness: int | None
    stale_tokens: int | None


class Inconsistent(Exception):
    """Stored tokens that do not match the log."""


class Segment(msgspec.Struct, frozen=True):
    """The turns of a sample; `cut`: there is more, which does not fit.

    `row` says of which branch, and which turns are in its loss: the others are context here. `end`: the sample's number
    of tokens if it is cut inside the last turn's output; None: it ends with a whole turn. `limit`: the session's limit
    at which it ended.
    """

    row: BranchRow
    place: Place
    turns: Sequence[TurnCommitted]
    cut: bool
    end: int | None = None
    limit: LimitName | None = None

    @property
    def number(self) -> int:
        """The segment's number in a linear session, the branch in a tree."""
        return self.row.leaf.segment

    @property
    def status(self) -> Status:
        """The status of the turns that it has in its loss: aborted, else truncated, else completed.

        A turn that is cut here does not reach its finish reason. Where it has none in its loss, all turns count.
        """
        whole = self.turns if self.end is None else self.turns[:-1]
        own = [event for event in whole if event.turn in self.row.in_loss] if self.row.in_loss else None
        statuses = {status_of(event.finish_reason) for event in (own or whole)}
        if "aborted" in statuses:
            return "aborted"
        return "truncated" if self.cut or self.limit is not None or "truncated" in statuses else "completed"

    @property
    def is_copied(self) -> bool:
        """Has it sampled tokens, and none of them in its loss? Of text, whose tokens nobody knows, the turns count."""
        if self.turns[0].is_text:
            return not self.row.in_loss
        ends = [*(event.base_tokens for event in self.turns[1:]), self.end or math.inf]
        sampled = [
            event.turn
            for event, end in zip(self.turns, ends, strict=True)
            if event.output_tokens and end > event.base_tokens + event.suffix_tokens
        ]
        return bool(sampled) and self.row.in_loss.isdisjoint(sampled)

    @property
    def last_status(self) -> Status:
        """The status of the last turn alone, as miles reports it."""
        status = status_of(self.turns[-1].finish_reason)
        ended = self.limit is not None and status != "aborted"
        return "truncated" if self.cut or ended else status


def segments(
    session: Session,
    rows: Sequence[BranchRow],
    events: Mapping[int, TurnCommitted],
    max_seq_len: int | None = None,
    truncate: Truncate = "turn",
) -> list[Segment]:
    """The samples' turns in the order of `rows`; `events` holds every turn of theirs.

    Each has at most `max_seq_len` tokens, is `truncated` where there were more, and is left out where nothing fits:
    no turn, with `token` no sampled token of the first turn.
    """
    fitting = (
        _fitting(row, place_of(session, row.leaf), [events[number] for number in row.turns], max_seq_len, truncate)
        for row in rows
    )
    return [
        segment
        if segment.cut or not session.reached
        else replace(segment, limit=session.reached.get(segment.row.leaf.number))
        for segment in fitting
        if segment.turns
    ]


def _fitting(
    row: BranchRow, place: Place, turns: Sequence[TurnCommitted], max_seq_len: int | None, truncate: Truncate
) -> Segment:
    """The part of a sample that fits. No sample ends inside a prompt: there is nothing to learn from it."""
    if max_seq_len is None:
        return Segment(row, place, turns, cut=False)
    ends = [event.base_tokens + event.suffix_tokens + event.output_tokens for event in turns]
    kept = bisect.bisect_right(ends, max_seq_len)
    if truncate == "token" and kept < len(turns):
        over = turns[kept]
        if over.base_tokens + over.suffix_tokens < max_seq_len:
            return Segment(row, place, turns[: kept + 1], cut=True, end=max_seq_len)
    return Segment(row, place, turns[:kept], kept < len(turns))


def sample(segment: Segment, content: Mapping[int, TurnTokens]) -> Sample:
    """`content` holds every turn of the segment. Raises Inconsistent."""
    turns = [content[event.turn] for event in segment.turns]
    tokens: list[bytes] = []
    logprobs: list[bytes] = []
    versions: list[VersionSpan] = []
    spans: list[TurnSpan] = []
    before = 0
    for turn, end in zip(turns, [*(turn.event.base_tokens for turn in turns[1:]), segment.end], strict=True):
        event = turn.event
        _check(turn, before)
        output_start = event.base_tokens + event.suffix_tokens
        before = output_start + event.output_tokens
        end = before if end is None else min(end, before)
        kept = end - output_start
        if kept < 0:
            raise Inconsistent(f"turn {event.turn} is continued from token {end}, before its output")
        tokens += [turn.suffix_ids, turn.output_ids[: kept * TOKEN_BYTES]]
        logprobs += [bytes(event.suffix_tokens * LOGPROB_BYTES), turn.logprobs[: kept * LOGPROB_BYTES]]
        versions += _version_spans(event, output_start, end)
        spans.append(_span(event, output_start, end))
    length = spans[-1].end
    mask = _mask(spans)
    context = [span for span in spans if span.turn not in segment.row.in_loss]
    by_token, names = _versions(versions, length)
    prompt_length = next((span.output_start for span in spans if span.end > span.output_start), length)
    first = turns[0].event
    return Sample(
        segment=segment.number,
        cause=first.segment_cause,
        parent_turn=first.parent,
        branch=segment.row.leaf.branch,
        place=segment.place,
        agent_id=segment.row.leaf.agent_id,
        in_loss=segment.row.in_loss,
        tokens=np.frombuffer(b"".join(tokens), "<i4"),
        loss_mask=_mask(spans, segment.row.in_loss) if context else mask,
        sampled_mask=mask,
        logprobs=np.frombuffer(b"".join(logprobs), "<f8"),
        weight_versions=by_token,
        weight_version_names=names,
        version_spans=versions,
        prompt_length=prompt_length,
        response_length=length - prompt_length,
        status=segment.status,
        last_status=segment.last_status,
        turns=spans,
        limit=segment.limit,
    )


def is_stale(version: str, current: int | None, most: int | None) -> bool:
    """Is a token of this weight version more than `most` behind `current`, or is not known how far?"""
    if current is None or not is_number(version):
        return True
    return most is not None and current - int(version) > most


def aged(sample: Sample, current: int | None, most: int | None, *, masks: bool) -> tuple[Sample, Age]:
    """The sample's age where `current` is the current weight version and tokens may be `most` versions behind.

    `masks`: older tokens leave the loss mask; whether the sample owns them was decided before.
    """
    mask = sample.loss_mask.copy()
    oldest: int | None = None
    is_known, stale = True, 0
    for span in sample.version_spans:
        own = int(mask[span.start : span.end].sum())
        if not own:
            continue
        if current is None or not is_number(span.version):
            is_known = False
        else:
            behind = current - int(span.version)
            oldest = behind if oldest is None else max(oldest, behind)
        if is_stale(span.version, current, most):
            stale += own
            mask[span.start : span.end] = 0
    age = Age(oldest if is_known else None, None if most is None else stale)
    return (msgspec.structs.replace(sample, loss_mask=mask) if masks and stale else sample), age


def _mask(spans: Sequence[TurnSpan], turns: Collection[int] | None = None) -> Array:
    """1 for each token that one of these turns (None: any) has sampled."""
    parts: list[bytes] = []
    for span in spans:
        is_set = turns is None or span.turn in turns
        parts += [bytes(span.output_start - span.start), (b"\1" if is_set else b"\0") * (span.end - span.output_start)]
    return np.frombuffer(b"".join(parts), np.uint8)


def _version_spans(event: TurnCommitted, output_start: int, end: int) -> list[VersionSpan]:
    """The turn's spans in the sample, of which the turn's output is [output_start, end)."""
    return [
        VersionSpan(span.version, output_start + span.start, min(output_start + span.end, end))
        for span in event.weight_versions
        if output_start + span.start < end
    ]


def _span(event: TurnCommitted, output_start: int, end: int) -> TurnSpan:
    return TurnSpan(
        turn=event.turn,
        start=event.base_tokens,
        output_start=output_start,
        end=end,
        finish_reason=event.finish_reason,
        engine=event.engine,
        dispatched=event.dispatched,
        adapter=event.adapter,
        parts=[
            Part(part.engine, output_start + part.start, min(output_start + part.end, end))
            for part in event.parts
            if output_start + part.start < end
        ],
        cached_tokens=event.cached_tokens,
        speculative=event.speculative,
    )


def _check(turn: TurnTokens, before: int) -> None:
    event = turn.event
    if event.base_tokens + event.trimmed != before:
        raise Inconsistent(f"turn {event.turn} continues {event.base_tokens} tokens, {before} are stored")
    lengths = len(turn.suffix_ids), len(turn.output_ids), len(turn.logprobs)
    suffix, output = event.suffix_tokens, event.output_tokens
    if lengths != (suffix * TOKEN_BYTES, output * TOKEN_BYTES, output * LOGPROB_BYTES):
        raise Inconsistent(
            f"turn {event.turn} has {lengths[0] // TOKEN_BYTES} + {lengths[1] // TOKEN_BYTES} tokens and "
            f"{lengths[2] // LOGPROB_BYTES} logprobs; the log says {suffix} + {output}"
        )


def _versions(spans: Sequence[VersionSpan], length: int) -> tuple[Array, list[str]]:
    by_token = np.full(length, -1, np.int64)
    names = list(dict.fromkeys(span.version for span in spans))
    numeric = all(map(is_number, names))
    numbers = {name: int(name) if numeric else number for number, name in enumerate(names)}
    for span in spans:
        by_token[span.start : span.end] = numbers[span.version]
    return by_token, [] if numeric else names


def status_of(finish_reason: str | None) -> Status:
    if finish_reason == "abort":
        return "aborted"
    return "truncated" if finish_reason == "length" else "completed"
