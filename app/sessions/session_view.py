"""Reads a session for the page, after any of its events: turns with their times, failed turns and rollbacks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import to_builtins
from msgspec.structs import asdict

from app.domain.events import LimitReached, Recorded, RolledBack, TurnAbandoned, TurnCommitted, TurnOpened, TurnRejected
from app.domain.session import Session
from app.errors import SessionUnreadable
from app.sessions.as_reply import as_reply
from app.sessions.session_at import INLINE, SessionAt, session_at
from app.sessions.session_list import AtGates, state_of
from app.sessions.tree_view import tree_of
from app.store.content import load_blobs
from app.store.database import Database
from app.store.ports import of_session
from turnlog.replies import FailedTurn, OpenTurn, RefusedRequest, Rollback, State, StatePayload, StateTurn

MAX_VALUE = 4096
"""Bytes of an annotation's value that a state has."""


class SessionViews:
    """Reads session views. `at_gates` returns the turns that wait at gates."""

    def __init__(self, database: Database, at_gates: AtGates) -> None:
        self._database = database
        self._at_gates = at_gates

    async def at(self, session_id: str, seq: int | None) -> State:
        """The session after event `seq` (None: the last). Raises as `session_at`."""
        state = await session_at(self._database, session_id, seq)
        problems = [] if state.damage is None else [{"part": "log", "message": state.damage}]
        metadata = await self._metadata(state.session, problems)
        is_at_gate = state.session.version == state.last_seq and session_id in self._at_gates()
        if len(state.events) <= INLINE:
            return _view(state, metadata, problems, is_at_gate=is_at_gate)
        return await asyncio.to_thread(_view, state, metadata, problems, is_at_gate=is_at_gate)

    async def _metadata(self, session: Session, problems: list[dict[str, str]]) -> msgspec.Raw | None:
        """The metadata; None if there is none, or if it was erased or is damaged (then with a problem added)."""
        blob = session.metadata
        if blob is None or session.status == "erased":
            return None
        try:
            blobs = await of_session(self._database, session.session_id, load_blobs, [blob.number])
        except SessionUnreadable as error:
            problems.append({"part": "metadata", "message": str(error)})
            return None
        return msgspec.Raw(blobs[blob.number])


def _view(state: SessionAt, metadata: msgspec.Raw | None, problems: list[dict[str, str]], *, is_at_gate: bool) -> State:
    session = state.session
    discarded_by = {
        turn: recorded.seq
        for recorded in state.events
        if isinstance(recorded.event, RolledBack)
        for turn in recorded.event.discarded
    }
    return State(
        session_id=session.session_id,
        seq=session.version,
        last_seq=state.last_seq,
        status=session.status,
        state=state_of(session.status, is_at_gate=is_at_gate, is_running=bool(session.open_turns)),
        erased=session.status == "erased",
        config=asdict(session.config),
        fork=None if session.fork is None else asdict(session.fork),
        metadata=cast(Any, metadata),  # as it is stored
        created_at=session.created_at,
        closed_at=session.closed_at,
        reward=None if session.reward is None else cast(Any, asdict(session.reward)),
        annotations={str(turn): cast(Any, state.said_of(turn, MAX_VALUE)) for turn in sorted(session.annotations)},
        turn_rewards={str(turn): cast(Any, asdict(reward)) for turn, reward in session.turn_rewards.items()},
        note=session.note,
        tags=list(session.tags),
        affinity=None if session.affinity is None else asdict(session.affinity),
        open_turns=[
            as_reply(OpenTurn, held, opened_at=state.events[held.fence - 1].at) for held in session.open_turns.values()
        ],
        tree=tree_of(state) if session.branches > 1 else None,
        turns=[
            _turn(state, recorded, recorded.event, discarded_by)
            for recorded in state.events
            if isinstance(recorded.event, TurnCommitted)
        ],
        failed=None if session.failed is None else to_builtins(session.failed),
        engine_errors=session.engine_errors,
        tool_errors=session.tool_errors,
        failed_turns=[
            _failed(state, recorded, recorded.event)
            for recorded in state.events
            if isinstance(recorded.event, TurnRejected | TurnAbandoned)
        ],
        refused=[
            as_reply(RefusedRequest, recorded.event, seq=recorded.seq, at=recorded.at)
            for recorded in state.events
            if isinstance(recorded.event, LimitReached) and recorded.event.refused
        ],
        rollbacks=[
            as_reply(Rollback, recorded.event, seq=recorded.seq, at=recorded.at)
            for recorded in state.events
            if isinstance(recorded.event, RolledBack)
        ],
        problems=problems,
    )


def _opened_at(state: SessionAt, fence: int) -> float | None:
    """When the claim with this fence was taken, in seconds since the epoch; None if unknown."""
    opened = state.events[fence - 1] if 0 < fence <= len(state.events) else None
    return opened.at if opened is not None and isinstance(opened.event, TurnOpened) else None


def _turn(state: SessionAt, recorded: Recorded, event: TurnCommitted, discarded_by: Mapping[int, int]) -> StateTurn:
    readable = {payload.kind for payload in state.session.whole_payloads(event.turn)}
    milliseconds = {stage: time / 1000 for stage, time in asdict(event.timing).items()} if event.timing else None
    return as_reply(
        StateTurn,
        event,
        live=event.turn not in discarded_by,
        opened_at=_opened_at(state, event.fence),
        committed_at=recorded.at,
        seq=recorded.seq,
        timing=milliseconds,
        prompt_tokens=event.base_tokens + event.suffix_tokens,
        messages=event.base_messages + event.new_messages + 1,
        weight_versions=list(map(asdict, event.weight_versions)),
        parts=list(map(asdict, event.parts)),
        payloads=[
            StatePayload(kind=ref.kind, rows=ref.stop - ref.start, tombstoned=ref.kind not in readable)
            for ref in event.payloads
        ],
        discarded_by=discarded_by.get(event.turn),
    )


def _failed(state: SessionAt, recorded: Recorded, event: TurnRejected | TurnAbandoned) -> FailedTurn:
    is_rejected = isinstance(event, TurnRejected)
    unknown = {} if is_rejected else dict.fromkeys(("status", "detail", "reply_bytes", "kept_bytes"))
    return as_reply(
        FailedTurn,
        event,
        opened_at=_opened_at(state, event.fence),
        ended_at=recorded.at,
        kind="rejected" if is_rejected else "abandoned",
        **unknown,
    )
