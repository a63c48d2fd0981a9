"""Traces as rLLM's gateway tells them, read from the log: each committed turn is one. Nothing of them is stored."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import numpy as np

from app.domain.events import is_number, shape_of
from app.domain.rules import superseded
from app.domain.session import Session, Turn
from app.errors import NotFound, PayloadTombstoned
from app.features.rllm.rules import name_of
from app.sessions import replay_payloads, transcript
from app.sessions.session_at import session_at
from app.sessions.transcript import WireTurn
from app.store.content import load_tokens
from app.store.database import Database
from app.store.ports import of_session
from workers.sampling_masks import Masks

Raw = msgspec.Raw


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
    raw_request: Raw
    raw_response: Raw


class _Named(msgspec.Struct):
    model: str = ""


async def every(database: Database, session_id: str, since: float | None, limit: int | None) -> AsyncIterator[Trace]:
    """The traces of a session in the order of their commits, from the time `since` on, at most `limit`.

    Raises SessionNotFound, SessionUnreadable, StoreUnavailable.
    """
    session, turns = await _told(database, session_id, since)
    async for turn in transcript.wire_turns(database, session, [turn.number for turn in turns[:limit]]):
        yield await _trace(database, session, turn)


async def count(database: Database, session_id: str) -> int:
    """Raises as `every`."""
    return len((await _told(database, session_id, None))[1])


async def one(database: Database, session_id: str, number: int) -> Trace:
    """Raises NotFound, else as `every`."""
    session, turns = await _told(database, session_id, None)
    if any(turn.number == number for turn in turns):
        async for turn in transcript.wire_turns(database, session, [number]):
            return await _trace(database, session, turn)
    raise NotFound(f"session {session_id} has no turn {number}")


async def _told(database: Database, session_id: str, since: float | None) -> tuple[Session, list[Turn]]:
    """The turns that are traces. One that was generated again since no client got its reply is none: rLLM counts
    its agent's steps off against them."""
    state = await session_at(database, session_id, whole=True)
    session = state.session
    if session.status == "erased":
        return session, []
    gone = superseded(session)
    turns = sorted((turn for turn in session.turns if turn.number not in gone), key=lambda turn: turn.seq)
    return session, [turn for turn in turns if since is None or state.turn(turn.number)[0] >= since]


async def _trace(database: Database, session: Session, turn: WireTurn) -> Trace:
    assert turn.prompt is not None
    event, number = turn.event, turn.event.turn
    output, logprobs = await _sampled(database, session, number)
    # A trainer's limit on staleness is kept if the oldest token is counted.
    versions = [*(span.version for span in event.weight_versions[:1]), event.dispatched]
    version = next((int(name) for name in versions if name is not None and is_number(name)), None)
    is_chat = shape_of(event.protocol) == "chat"
    return Trace(
        trace_id=f"{session.session_id}.{number}",
        session_id=name_of(session.name or session.session_id),
        model=msgspec.json.decode(turn.request, type=_Named).model,
        messages=[Raw(message) for message in turn.messages] if is_chat else [],
        prompt_token_ids=turn.prompt.tolist(),
        response_message=Raw(turn.exchange.message if is_chat else b"{}"),
        completion_token_ids=output,
        logprobs=logprobs or None,
        routing_matrices=await _routing(database, session, number),
        finish_reason=event.finish_reason,
        weight_version=version,
        latency_ms=max(turn.at - event.requested_at, 0.0) * 1000,
        token_counts={"prompt": event.base_tokens + event.suffix_tokens, "completion": event.output_tokens},
        timestamp=turn.at,
        metadata={"turnlog_session_id": session.session_id, "turn": number, "parent": event.parent or None},
        raw_request=Raw(turn.request),
        raw_response=Raw(turn.reply({})),
    )


async def _sampled(database: Database, session: Session, number: int) -> tuple[list[int], list[float]]:
    """The output's ids and logprobs; none of text alone. Raises SessionUnreadable."""
    if session.is_text:
        return [], []
    stored = await of_session(database, session.session_id, load_tokens, [number])
    tokens = stored[number]
    logprobs: list[float] = np.frombuffer(tokens.logprobs, "<f8").tolist()
    return np.frombuffer(tokens.output_ids, "<i4").tolist(), logprobs


async def _routing(database: Database, session: Session, number: int) -> list[str] | None:
    """None where there is none, where it is no longer kept, and where it cannot be told: its first rows are
    missing, or nobody knows how many layers it has."""
    payload = session.payload(number, "routed_experts")
    if payload is None or payload.start or len(payload.shape) != 2:
        return None
    try:
        _, rows = await replay_payloads.payload_of(database, session, number, "routed_experts")
    except (NotFound, PayloadTombstoned):
        return None  # since `session` was read
    assert not isinstance(rows, Masks)
    header = {"shape": list(payload.shape), "dtype": rows.dtype.name}
    return [msgspec.json.encode(header).decode(), base64.b64encode(rows.tobytes()).decode()]
