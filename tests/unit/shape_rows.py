"""Rows for the tests of trainers' shapes, and what they hold by a reading of their own: plain lists, turn by turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from helpers.log import committed, float64, int32
from hypothesis import strategies as st
from making import samples

from app.domain.events import Recorded, SessionConfig, TurnCommitted
from app.domain.samples import TurnTokens
from app.domain.session import AssignedReward, Session, Status, fold
from app.export.row import Routing, Row, Source, TurnContent, TurnSampling, sampling_of
from workers.reply import VersionSpan

JSON = dict[str, Any]


class Given(msgspec.Struct, frozen=True):
    """A turn: its prompt less the `trimmed` last tokens before it goes on with `prompt`; then comes `output`."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    trimmed: int = 0
    finish_reason: str | None = "stop"
    version: str = "3"
    params: JSON = {}
    messages: tuple[object, ...] = ({"role": "user", "content": "ask"},)
    message: object = msgspec.field(default_factory=lambda: {"role": "assistant", "content": "answer"})
    tools: list[JSON] | None = None
    segment: int = 0


class Expected(msgspec.Struct, frozen=True):
    """What a segment must say, token by token; `turn_of` counts its turns from 0."""

    tokens: list[int]
    sampled: list[bool]
    logprobs: list[float]
    turn_of: list[int]

    @property
    def first_sampled(self) -> int:
        return self.sampled.index(True) if True in self.sampled else len(self.tokens)


def expected(turns: Sequence[Given]) -> Expected:
    tokens: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    turn_of: list[int] = []
    for number, turn in enumerate(turns):
        for column in (tokens, sampled, logprobs, turn_of):
            del column[len(column) - turn.trimmed :]
        tokens += turn.prompt + turn.output
        sampled += [False] * len(turn.prompt) + [True] * len(turn.output)
        logprobs += [0.0] * len(turn.prompt) + turn.logprobs
        turn_of += [number] * (len(turn.prompt) + len(turn.output))
    return Expected(tokens, sampled, logprobs, turn_of)


def rows(
    turns: Sequence[Given],
    *,
    session_id: str = "s",
    reward: float | None = 1.0,
    advantage: float | None = None,
    group_id: str | None = "g",
    attempt: int | None = 0,
    status: Status = "closed",
    metadata: JSON | None = None,
    routing: Mapping[str, Routing | None] | None = None,
    max_seq_len: int | None = None,
) -> list[Row]:
    """One for each segment of the session."""
    content = {number: _stored(number, turn, turns) for number, turn in enumerate(turns, start=1)}
    begun = Session(
        session_id=session_id,
        version=0,
        status="open",
        config=SessionConfig(rollback_window=1, group_id=group_id, attempt=attempt),
        body_hash="00",
        created_at=1_000.0,
        last_event_at=1_000.0,
        reward=None if reward is None else AssignedReward(reward, {"exact": reward}),
    )
    committed_turns = (Recorded(seq, 1_000.0, one.event) for seq, one in enumerate(content.values(), 1))
    folded = fold(session_id, committed_turns, begun)
    assert folded is not None
    session = msgspec.structs.replace(folded, version=9, status=status)
    found = samples(session, content, max_seq_len)
    conversation = [[*turn.messages, turn.message] for turn in turns]
    return [
        Row(
            session=session,
            sample=sample,
            turns=[_content(turns[span.turn - 1], content[span.turn].event) for span in sample.turns],
            messages=[raw(message) for both in conversation[: sample.turns[-1].turn] for message in both],
            metadata=None if metadata is None else raw(metadata),
            source=Source(["http://engine"], ["sglang"], 1_000.0, 2_000.0, "0.1.0"),
            cursor=f"after-{session_id}-{sample.segment}",
            is_last=sample is found[-1],
            routing=routing or {},
            advantage=advantage,
            rollout_rows=len(found),
            sampling=[_sampling(turns[span.turn - 1], content[span.turn].event) for span in sample.turns],
        )
        for sample in found
    ]


def raw(value: object) -> bytes:
    return json.dumps(value).encode()


def _stored(number: int, turn: Given, turns: Sequence[Given]) -> TurnTokens:
    earlier = [other for other in turns[: number - 1] if other.segment == turn.segment]
    base = len(expected(earlier).tokens) - turn.trimmed
    event = committed(
        number,
        number - 1,
        number,
        segment=turn.segment,
        base_messages=sum(len(other.messages) + 1 for other in turns[: number - 1]),
        new_messages=len(turn.messages),
        base_tokens=base,
        suffix_tokens=len(turn.prompt),
        output_tokens=len(turn.output),
        weight_versions=(VersionSpan(turn.version, 0, len(turn.output)),) if turn.output else (),
        requested_at=1_000.0 + number,
        finish_reason=turn.finish_reason,
        trimmed=turn.trimmed,
        cached_tokens=base,
    )
    return TurnTokens(event, int32(turn.prompt), int32(turn.output), float64(turn.logprobs))


def _sampling(turn: Given, event: TurnCommitted) -> TurnSampling:
    return sampling_of(event, raw({name: value for name, value in turn.params.items() if name != "model"}))


def _content(turn: Given, event: TurnCommitted) -> TurnContent:
    return TurnContent(
        event=event,
        at=2_000.0 + event.turn,
        messages=[raw(message) for message in turn.messages],
        message=raw(turn.message),
        params=raw(turn.params),
        tools=None if turn.tools is None else raw(turn.tools),
    )


@st.composite
def conversations(draw: st.DrawFn) -> list[Given]:
    """Turns of one segment: trimmed tails, aborts without a token, prompts without a new one."""
    ids = st.integers(0, 2**31 - 1)
    turns: list[Given] = []
    for number in range(draw(st.integers(1, 4))):
        output = draw(st.lists(ids, max_size=4))
        turns.append(
            Given(
                prompt=draw(st.lists(ids, min_size=0 if number else 1, max_size=3)),
                output=output,
                logprobs=draw(st.lists(st.floats(-9, 0), min_size=len(output), max_size=len(output))),
                trimmed=draw(st.integers(0, min(1, len(turns[-1].output)))) if number else 0,
                finish_reason=draw(st.sampled_from(["stop", "length", "abort", "tool_calls"])),
                version=draw(st.sampled_from(["7", "8"])),
                params=draw(st.sampled_from([{}, {"temperature": None}, {"temperature": 0}, {"temperature": 0.5}])),
            )
        )
    return turns


TWO_TURNS = [
    Given([1, 2], [3, 4], [-0.5, -0.25], params={"model": "m", "temperature": 0.7}),
    Given([5], [6], [-0.125], trimmed=1, finish_reason="length", version="4"),
]
"""Tokens 1 2 3 5 6 once the 4 has been trimmed; 3 and 6 were sampled."""

TWO_SEGMENTS = [
    Given([1, 2], [3], [-1.0]),
    Given([1, 9], [4], [-2.0], finish_reason="abort", segment=1),
]


def experts(length: int) -> dict[str, Routing | None]:
    """Rows of two layers and three experts each for a sample of `length` tokens."""
    ids = np.arange((length - 1) * 6, dtype=np.uint8).reshape(-1, 2, 3)
    return {"routed_experts": Routing(ids, 0)}


def lists(fields: Mapping[str, object]) -> JSON:
    """A row as a reader of NDJSON has it: arrays as lists."""
    return {name: _plain(value) for name, value in fields.items()}


def _plain(value: object) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, msgspec.Raw):
        return json.loads(bytes(value))
    if isinstance(value, Mapping):
        return lists(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
