"""The `turnlog` row: one a segment, everything the log knows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from app.domain.samples import Sample
from app.domain.session import Session


def in_one_line(raw: bytes) -> bytes:
    """The same JSON without line breaks, which can only stand between its tokens."""
    return raw.replace(b"\n", b" ").replace(b"\r", b" ")


class Routing(msgspec.Struct, frozen=True):
    """Rows [row_start, row_start + rows) of a replay payload as base64 of little-endian ids; `shape` is of all."""

    data: str
    row_start: int
    rows: int
    dtype: str
    shape: Sequence[int]


def replay_fields(found: Mapping[str, Routing | None], tombstoned: Sequence[str]) -> dict[str, object]:
    """What a row says of replay payloads: `routed_experts` beside its own fields, any other kind as an object."""
    experts = found.get("routed_experts")
    fields: dict[str, object] = {"routed_experts": None, "row_start": None, "rows": 0, "dtype": None, "shape": []}
    if experts is not None:
        fields = {**msgspec.structs.asdict(experts), "routed_experts": experts.data}
        del fields["data"]
    others = {kind: routing for kind, routing in found.items() if kind != "routed_experts"}
    return {**fields, **others, "tombstoned": tombstoned}


class Source(msgspec.Struct, frozen=True):
    """Where a row comes from: engines, dialects and the times (seconds since the epoch) of its turns."""

    engines: Sequence[str]
    dialects: Sequence[str]
    created_at: float
    committed_at: float
    turnlog_version: str


def row(
    session: Session,
    sample: Sample,
    *,
    messages: Sequence[bytes],
    metadata: bytes | None,
    source: Source,
    cursor: str,
    last_segment: bool,
    replay: Mapping[str, object],
) -> bytes:
    """One row as JSON; `messages` is the conversation at the segment's end, raw, `replay` the payloads' fields."""
    reward = session.reward
    fields: Mapping[str, object] = {
        "session_id": session.session_id,
        "segment": sample.segment,
        "group_id": session.config.group_id,
        "attempt": session.config.attempt,
        "status": sample.status,
        "final": session.status != "open" and last_segment,
        "as_of_seq": session.version,
        "reward": None if reward is None else reward.reward,
        "reward_components": {} if reward is None else reward.components,
        "turn_rewards": {
            str(number): {"reward": given.reward, "components": given.components}
            for number, given in session.turn_rewards.items()
        },
        "prompt_length": sample.prompt_length,
        "response_length": sample.response_length,
        "tokens": sample.tokens,
        "loss_mask": sample.loss_mask,
        "sampled_mask": sample.sampled_mask,
        "logprobs": sample.logprobs,
        "weight_versions": sample.weight_versions,
        "weight_version_names": sample.weight_version_names,
        "turns": sample.turns,
        **replay,
        "segment_cause": sample.cause,
        "messages": msgspec.Raw(b"[" + in_one_line(b",".join(messages)) + b"]"),
        "metadata": msgspec.Raw(metadata or b"{}"),
        "provenance": source,
        "cursor": cursor,
    }
    return msgspec.json.encode(fields) + b"\n"
