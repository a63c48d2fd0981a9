"""Reads a segment's tokens for the page, as a trainer gets them, with the text that the engine gave for each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from app.domain.events import TurnCommitted
from app.domain.samples import Inconsistent, Sample, Segment, TurnSpan, TurnTokens, sample
from app.errors import NotFound
from app.sessions.session_at import SessionAt, session_at
from app.store import reads
from app.store.engine import Database
from app.store.reads import Frames
from workers import codec
from workers.codec import CorruptContent, Wire
from workers.join_text import token_texts
from workers.parse_json import Fields, Rejected, is_null, object_at

if TYPE_CHECKING:
    from app.tito.prompts import Prompts

TEXT_TURNS = 64
"""Maximum number of turns whose stored replies are read for the texts of one page of tokens."""

_CHOICES = msgspec.json.Decoder(list[msgspec.Raw])


class TokenRow(NamedTuple):
    """A token. `version` is an index into the view's `versions`; -1 if the token was not sampled."""

    id: int
    sampled: int
    loss_mask: int
    logprob: float | None
    version: int
    turn: int


class SegmentView(msgspec.Struct, frozen=True):
    """`cause` says why the segment began; null at the session's start, or after a rollback past its first turn."""

    segment: int
    cause: str | None
    tokens: int
    prompt_tokens: int
    turns: Sequence[int]


class TurnRange(msgspec.Struct, frozen=True):
    """A turn's own tokens are [start, end); its sampled tokens begin at `output_start`."""

    turn: int
    start: int
    output_start: int
    end: int


class Boundary(msgspec.Struct, frozen=True):
    """Tokens sampled from token `at` on have this weight version."""

    at: int
    version: str


class TokenView(msgspec.Struct, frozen=True):
    """Tokens [start, start + len(tokens)) of the `total` of segment `segment`, which is null if there is none.

    `texts` has one text per token; it is null if neither a tokenizer nor the engine gives any. `error` says why the
    segment's tokens cannot be read.
    """

    segment: int | None
    segments: Sequence[SegmentView]
    total: int
    start: int
    tokens: Sequence[TokenRow]
    texts: Sequence[str | None] | None
    versions: Sequence[str]
    turns: Sequence[TurnRange]
    boundaries: Sequence[Boundary]
    error: str | None = None


class TokenViews:
    """Reads token views. `prompts` contains the tokenizer, if there is one."""

    def __init__(self, database: Database, prompts: Prompts | None) -> None:
        self._database = database
        self._prompts = prompts

    async def at(self, session_id: str, seq: int | None, segment: int | None, start: int, limit: int) -> TokenView:
        """Tokens of a live segment (None: the last) after event `seq`.

        Raises as `session_at`, and NotFound for an unknown segment.
        """
        found = await session_at(self._database, session_id, seq)
        live = _segments(found)
        segments = [_segment_view(number, turns) for number, turns in live.items()]
        if segment is None and live:
            segment = max(live)
        if segment is None:
            return TokenView(None, [], 0, 0, [], None, [], [], [])
        if segment not in live:
            raise NotFound(f"session {session_id} has no live segment {segment} at event {found.session.version}")
        frames = await self._frames(session_id, [turn.turn for turn in live[segment]], wire=False)
        try:
            made = await asyncio.to_thread(_sample, segment, live[segment], frames)
        except (CorruptContent, Inconsistent) as error:
            return TokenView(segment, segments, 0, start, [], None, [], [], [], str(error))
        counts = {turn.turn: turn.output_tokens for turn in live[segment]}
        texts = await self._texts(session_id, made, counts, start, limit)
        return await asyncio.to_thread(_view, made, segments, start, limit, texts)

    async def _frames(self, session_id: str, numbers: Sequence[int], *, wire: bool) -> Frames:
        return await self._database.read(
            lambda connection: reads.load_frames(connection, session_id, numbers, facts=not wire, wire=wire),
            session_id=session_id,
        )

    async def _texts(
        self, session_id: str, made: Sample, counts: Mapping[int, int], start: int, limit: int
    ) -> list[str | None] | None:
        """One text per token of the page; None if all are unknown. `counts`: output tokens by turn."""
        ids: list[int] = made.tokens[start : start + limit].tolist()
        prompts = self._prompts
        if prompts is not None:
            known = await asyncio.to_thread(lambda: {one: prompts.decode([one]) for one in set(ids)})
            return [known[one] for one in ids]
        end = start + len(ids)
        spans = [span for span in made.turns if span.output_start < end and span.end > start][:TEXT_TURNS]
        frames = await self._frames(session_id, [span.turn for span in spans], wire=True)
        return await asyncio.to_thread(_texts_of_spans, spans, counts, frames, start, end)


def _segments(found: SessionAt) -> dict[int, list[TurnCommitted]]:
    """The live turns of each live segment, oldest first."""
    segments: dict[int, list[TurnCommitted]] = {}
    for number in found.session.path:
        _, event = found.turn(number)
        segments.setdefault(event.segment, []).append(event)
    return dict(sorted(segments.items()))


def _segment_view(number: int, turns: Sequence[TurnCommitted]) -> SegmentView:
    first, last = turns[0], turns[-1]
    return SegmentView(
        segment=number,
        cause=first.segment_cause,
        tokens=last.base_tokens + last.suffix_tokens + last.output_tokens,
        prompt_tokens=first.base_tokens + first.suffix_tokens,
        turns=[turn.turn for turn in turns],
    )


def _sample(number: int, turns: Sequence[TurnCommitted], frames: Frames) -> Sample:
    """The same sample that an export makes. Raises CorruptContent, Inconsistent."""
    facts = reads.unpack_facts(frames, [turn.turn for turn in turns])
    content = [
        TurnTokens(turn, facts[turn.turn].suffix_ids, facts[turn.turn].output_ids, facts[turn.turn].logprobs)
        for turn in turns
    ]
    return sample(Segment(number, content, cut=False))


def _view(
    made: Sample, segments: Sequence[SegmentView], start: int, limit: int, texts: list[str | None] | None
) -> TokenView:
    part = slice(start, start + limit)
    versions = list(dict.fromkeys(span.version for span in made.version_spans))
    by_token = np.full(len(made.tokens), -1, np.int32)
    turns = np.zeros(len(made.tokens), np.int32)
    for span in made.version_spans:
        by_token[span.start : span.end] = versions.index(span.version)
    for turn in made.turns:
        turns[turn.start : turn.end] = turn.turn
    columns = (made.tokens, made.sampled_mask, made.loss_mask, made.logprobs, by_token, turns)
    rows = zip(*(column[part].tolist() for column in columns), strict=True)
    return TokenView(
        segment=made.segment,
        segments=segments,
        total=len(made.tokens),
        start=start,
        tokens=[
            TokenRow(token, sampled, masked, logprob if sampled else None, version, turn)
            for token, sampled, masked, logprob, version, turn in rows
        ],
        texts=texts,
        versions=versions,
        turns=[TurnRange(span.turn, span.start, span.output_start, span.end) for span in made.turns],
        boundaries=_boundaries(made),
    )


def _boundaries(made: Sample) -> list[Boundary]:
    found: list[Boundary] = []
    for span in made.version_spans:
        if span.end > span.start and (not found or found[-1].version != span.version):
            found.append(Boundary(span.start, span.version))
    return found


def _texts_of_spans(
    spans: Sequence[TurnSpan], counts: Mapping[int, int], frames: Frames, start: int, end: int
) -> list[str | None] | None:
    """Texts of the tokens [start, end) from the engine's stored replies; None if there are none."""
    texts: list[str | None] = [None] * (end - start)
    for span in spans:
        parts = _texts_of(frames.get(span.turn, (None, None))[1], counts[span.turn])
        for index, text in enumerate(parts, span.output_start):
            if start <= index < min(end, span.end):
                texts[index - start] = text.decode(errors="replace")
    return texts if any(text is not None for text in texts) else None


def _texts_of(frame: bytes | None, count: int) -> Sequence[bytes]:
    """The texts in a stored reply; empty if it has none or is damaged, since only people read them."""
    try:
        wire = codec.unpack(frame, Wire)
        root = object_at(codec.paste(wire, memoryview(b"").cast("i"), {}), "the body")
        choice = object_at(_CHOICES.decode(root.get("choices", b"[]"))[0], "choices[0]")
        return token_texts(_fields(choice, "meta_info"), _fields(choice, "logprobs"), count) or ()
    except (CorruptContent, Rejected, msgspec.MsgspecError, IndexError):
        return ()


def _fields(home: Fields, name: str) -> Fields:
    raw = home.get(name)
    return {} if raw is None or is_null(raw) else object_at(raw, name)
