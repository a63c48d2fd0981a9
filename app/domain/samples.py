"""What a trainer reads: one sample per segment of a session, from the facts of its live turns.

A segment is a run of turns in which every prompt continues the tokens before it exactly. Nothing is
guessed, padded or cut: where a prompt did not continue them, a new segment began when it was committed.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from app.domain.events import TurnCommitted, VersionSpan
from app.domain.session import Session

Status = Literal["completed", "truncated", "aborted"]


class TurnTokens(msgspec.Struct, frozen=True):
    """One turn's own tokens: new prompt ids and output ids (int32), output logprobs (float64)."""

    event: TurnCommitted
    suffix_ids: bytes
    output_ids: bytes
    logprobs: bytes


class TurnSpan(msgspec.Struct, frozen=True):
    """Where turn `turn` stands in the sample: its new prompt [start, output_start), its output [.., end)."""

    turn: int
    start: int
    output_start: int
    end: int
    finish_reason: str | None


class Sample(msgspec.Struct, frozen=True):
    """T tokens with, for each, its masks, logprob (0.0 where not sampled) and weight version.

    `weight_versions` holds numbers where every version of the sample is one, else indices into
    `weight_version_names`; −1 where not sampled. `prompt_length` counts the tokens before the first
    sampled one.
    """

    segment: int
    cause: str | None
    parent_turn: int
    tokens: Sequence[int]
    loss_mask: Sequence[int]
    sampled_mask: Sequence[int]
    logprobs: Sequence[float]
    weight_versions: Sequence[int]
    weight_version_names: Sequence[str]
    prompt_length: int
    response_length: int
    status: Status
    turns: Sequence[TurnSpan]


class Inconsistent(Exception):
    """Stored tokens that do not add up to what the log says of them."""


def samples(session: Session, content: Mapping[int, TurnTokens], max_seq_len: int | None = None) -> list[Sample]:
    """The session's samples in order; `content` holds every live turn.

    A sample ends with the last turn with which it has at most `max_seq_len` tokens, and is then `truncated`;
    one whose first turn is too long is left out. Raises Inconsistent.
    """
    segments: dict[int, list[TurnTokens]] = {}
    for number in session.path:
        turn = content[number]
        segments.setdefault(turn.event.segment, []).append(turn)
    fitting = ((turns, _fitting(turns, max_seq_len)) for _, turns in sorted(segments.items()))
    return [_sample(turns[:kept], kept < len(turns)) for turns, kept in fitting if kept]


def _fitting(turns: Sequence[TurnTokens], max_seq_len: int | None) -> int:
    """How many of a segment's turns fit."""
    if max_seq_len is None:
        return len(turns)
    events = (turn.event for turn in turns)
    ends = [event.base_tokens + event.suffix_tokens + event.output_tokens for event in events]
    return bisect.bisect_right(ends, max_seq_len)


def _sample(turns: Sequence[TurnTokens], cut: bool) -> Sample:
    tokens, logprobs, mask = array("i"), array("d"), array("b")
    versions: list[VersionSpan] = []
    spans: list[TurnSpan] = []
    for turn in turns:
        event, start = turn.event, len(tokens)
        if event.base_tokens != start:
            raise Inconsistent(f"turn {event.turn} continues {event.base_tokens} tokens, {start} are stored")
        tokens.frombytes(turn.suffix_ids)
        sampled_from = len(tokens)
        tokens.frombytes(turn.output_ids)
        sampled = len(tokens) - sampled_from
        logprobs.extend([0.0] * (sampled_from - start))
        logprobs.frombytes(turn.logprobs)
        mask.extend([0] * (sampled_from - start) + [1] * sampled)
        _check(event, sampled_from - start, sampled, len(tokens), len(logprobs))
        versions += [
            VersionSpan(span.version, sampled_from + span.start, sampled_from + span.end)
            for span in event.weight_versions
        ]
        spans.append(TurnSpan(event.turn, start, sampled_from, len(tokens), event.finish_reason))
    by_token, names = _versions(versions, len(tokens))
    prompt_length = next((i for i, sampled in enumerate(mask) if sampled), len(tokens))
    first, last = turns[0].event, turns[-1].event
    masked = mask.tolist()
    return Sample(
        segment=first.segment,
        cause=first.segment_cause,
        parent_turn=first.parent,
        tokens=tokens.tolist(),
        loss_mask=masked,
        sampled_mask=masked,
        logprobs=logprobs.tolist(),
        weight_versions=by_token,
        weight_version_names=names,
        prompt_length=prompt_length,
        response_length=len(tokens) - prompt_length,
        status="truncated" if cut else status_of(last.finish_reason),
        turns=spans,
    )


def _check(event: TurnCommitted, suffix: int, output: int, tokens: int, logprobs: int) -> None:
    if suffix != event.suffix_tokens or output != event.output_tokens or tokens != logprobs:
        raise Inconsistent(
            f"turn {event.turn} has {suffix} + {output} tokens and {logprobs} logprobs for {tokens}; "
            f"the log says {event.suffix_tokens} + {event.output_tokens}"
        )


def _versions(spans: Sequence[VersionSpan], length: int) -> tuple[list[int], list[str]]:
    by_token = [-1] * length
    names: list[str] = []
    numeric = all(_is_number(span.version) for span in spans)
    for span in spans:
        if not numeric and span.version not in names:
            names.append(span.version)
        value = int(span.version) if numeric else names.index(span.version)
        by_token[span.start : span.end] = [value] * (span.end - span.start)
    return by_token, names


def _is_number(version: str) -> bool:
    """One that a 64-bit integer holds."""
    return version.isascii() and version.isdigit() and len(version) < 19


def status_of(finish_reason: str | None) -> Status:
    if finish_reason == "abort":
        return "aborted"
    return "truncated" if finish_reason == "length" else "completed"
