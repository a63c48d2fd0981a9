"""rLLM's row: the `TraceRecord`s of its gateway, a generation each (rllm-model-gateway 0.1, and rLLM's of August).

A session's records are those of all its rows together, in the order of `metadata.turn`. rLLM's gateway routes tell the
same records (`app/features/rllm`), with what went to and came from the engine.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec

from app.domain.events import TurnCommitted, is_number
from app.domain.samples import Array
from app.domain.session import Session
from app.export.row import Columns, Fields, Row
from app.export.shapes import shared
from app.export.shapes.shared import Generation

Raw = msgspec.Raw

COLUMNS: Columns = {"traces": "json", "reward": "float64", "advantage": "float64", **shared.BESIDE}


class Trace(msgspec.Struct):
    """A generation with its tokens: rLLM's `TraceRecord`, field by field.

    `messages`, `raw_request` and `raw_response` are what went to and came from the engine. `weight_version` is that of
    its first token, if it is a number. `routing_matrices` are a header and the experts of prompt and output in base64,
    as rLLM's trainer for verl decodes them. `metadata` says where the turn is in Turnlog.
    """

    trace_id: str
    session_id: str
    model: str
    messages: Sequence[Raw]
    prompt_token_ids: list[int]
    response_message: Raw
    completion_token_ids: list[int]
    logprobs: list[float] | None
    routing_matrices: list[str] | None
    finish_reason: str | None
    weight_version: int | None
    latency_ms: float
    token_counts: dict[str, int]
    timestamp: float
    metadata: dict[str, Any]
    raw_request: Raw | None = None
    raw_response: Raw | None = None


def trace(
    session: Session,
    event: TurnCommitted,
    at: float,
    *,
    name: str,
    params: bytes,
    messages: Sequence[bytes],
    reply: bytes,
    prompt: list[int],
    output: list[int],
    logprobs: list[float],
    experts: Array | None,
) -> Trace:
    """A committed turn. `at` is when it was committed, `name` what rLLM calls the session, `params` what names the
    model, `experts` the ids [prompt and output less one token, layers, k]."""
    # A trainer's limit on staleness is kept if the oldest token is counted.
    versions = [*(span.version for span in event.weight_versions[:1]), event.dispatched]
    version = next((int(one) for one in versions if one is not None and is_number(one)), None)
    return Trace(
        trace_id=f"{session.session_id}.{event.turn}",
        session_id=name,
        model=shared.model_of(params) or "",
        messages=[Raw(message) for message in messages],
        prompt_token_ids=prompt,
        response_message=Raw(reply),
        completion_token_ids=output,
        logprobs=logprobs or None,
        routing_matrices=None if experts is None else _matrices(experts),
        finish_reason=event.finish_reason,
        weight_version=version,
        latency_ms=max(at - event.requested_at, 0.0) * 1000,
        token_counts={"prompt": event.base_tokens + event.suffix_tokens, "completion": event.output_tokens},
        timestamp=at,
        metadata={"turnlog_session_id": session.session_id, "turn": event.turn, "parent": event.parent or None},
    )


def _matrices(experts: Array) -> list[str]:
    header = {"shape": list(experts.shape[1:]), "dtype": experts.dtype.name}
    return [msgspec.json.encode(header).decode(), base64.b64encode(experts.tobytes()).decode()]


def fields(row: Row) -> Fields:
    """`traces` has the generations that this row has in its loss: none for a row that has none."""
    return {
        "traces": [_trace(row, one) for one in shared.trained(row)],
        "reward": row.reward,
        "advantage": row.advantage,
        **shared.beside_messages(row),
    }


def _trace(row: Row, one: Generation) -> Fields:
    """A `Trace` whose ids and logprobs are views of the row's: as lists those of all prompts took gigabytes."""
    sample, (start, end) = row.sample, (one.span.output_start, one.span.end)
    experts = row.routing.get("routed_experts")
    is_whole = experts is not None and experts.row_start == 0 and experts.ids.ndim == 3 and len(experts.ids) >= end - 1
    made = trace(
        row.session,
        one.turn.event,
        one.turn.at,
        name=row.session.name or row.session.session_id,
        params=one.turn.params,
        messages=one.messages,
        reply=one.turn.message,
        prompt=[],
        output=[],
        logprobs=[],
        experts=experts.ids[: end - 1] if experts is not None and is_whole else None,
    )
    return {
        **msgspec.structs.asdict(made),
        "prompt_token_ids": sample.tokens[:start],
        "completion_token_ids": sample.tokens[start:end],
        "logprobs": sample.logprobs[start:end] if end > start else None,
    }
