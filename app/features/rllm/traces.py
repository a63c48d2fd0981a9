"""Traces as rLLM's gateway tells them, read from the log: each committed turn is one. Nothing of them is stored."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
from msgspec import Raw

from app.domain.events import shape_of
from app.domain.rules import superseded
from app.domain.samples import Array
from app.domain.session import Session, Turn
from app.errors import NotFound, PayloadTombstoned
from app.export.shapes.rllm import Trace, trace
from app.features.rllm.rules import name_of
from app.sessions import replay_payloads, transcript
from app.sessions.session_at import session_at
from app.sessions.transcript import WireTurn
from app.store.content import load_tokens
from app.store.database import Database
from app.store.ports import of_session
from workers.sampling_masks import Masks


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
    event = turn.event
    output, logprobs = await _sampled(database, session, event.turn)
    is_chat = shape_of(event.protocol) == "chat"
    told = trace(
        session,
        event,
        turn.at,
        name=name_of(session.name or session.session_id),
        params=turn.request,
        messages=turn.messages if is_chat else (),
        reply=turn.exchange.message if is_chat else b"{}",
        prompt=turn.prompt.tolist(),
        output=output,
        logprobs=logprobs,
        experts=await _experts(database, session, event.turn),
    )
    told.raw_request, told.raw_response = Raw(turn.request), Raw(turn.reply({}))
    return told


async def _sampled(database: Database, session: Session, number: int) -> tuple[list[int], list[float]]:
    """The output's ids and logprobs; none of text alone. Raises SessionUnreadable."""
    if session.is_text:
        return [], []
    stored = await of_session(database, session.session_id, load_tokens, [number])
    tokens = stored[number]
    logprobs: list[float] = np.frombuffer(tokens.logprobs, "<f8").tolist()
    return np.frombuffer(tokens.output_ids, "<i4").tolist(), logprobs


async def _experts(database: Database, session: Session, number: int) -> Array | None:
    """None where there are none, where they are no longer kept, and where they cannot be told: the first rows are
    missing, or nobody knows how many layers they have."""
    payload = session.payload(number, "routed_experts")
    if payload is None or payload.start or len(payload.shape) != 2:
        return None
    try:
        _, rows = await replay_payloads.payload_of(database, session, number, "routed_experts")
    except (NotFound, PayloadTombstoned):
        return None  # since `session` was read
    assert not isinstance(rows, Masks)
    return rows.reshape(-1, *payload.shape)
