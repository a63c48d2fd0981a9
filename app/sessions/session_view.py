"""Reads a session for the page, after any of its events: turns with their times, failed turns and rollbacks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import asdict

from app.domain.events import ForkRef, Recorded, RolledBack, TurnAbandoned, TurnCommitted, TurnOpened, TurnRejected
from app.domain.session import OpenTurn, Session
from app.errors import SessionUnreadable
from app.sessions.session_at import INLINE, SessionAt, session_at
from app.sessions.session_list import AtGates
from app.sessions.tree_view import tree_of
from app.store import reads
from app.store.engine import Database
from turnlog.parameters import SessionState
from turnlog.replies import Tree
from workers.codec import CorruptContent
from workers.parse_parts import VersionSpan


class StageTimes(msgspec.Struct, frozen=True):
    """Milliseconds in each stage of a turn; see `events.Timing`."""

    gate: float
    claim: float
    prepare: float
    engine: float
    validate: float


class PartView(msgspec.Struct, frozen=True):
    """Output tokens [start, end) come from one generation of this engine."""

    engine: str
    start: int
    end: int


class PayloadView(msgspec.Struct, frozen=True):
    kind: str
    rows: int
    tombstoned: bool


class TurnView(msgspec.Struct, frozen=True):
    """A committed turn, live or discarded. `seq` is its commit's; `messages` and tokens include all earlier ones."""

    turn: int
    parent: int
    segment: int
    segment_cause: str | None
    live: bool
    opened_at: float | None
    committed_at: float
    seq: int
    fence: int
    engine: str
    dialect: str
    protocol: str
    adapter: str | None
    finish_reason: str | None
    timing: StageTimes | None
    prompt_tokens: int
    base_tokens: int
    suffix_tokens: int
    output_tokens: int
    cached_tokens: int | None
    trimmed: int
    messages: int
    weight_versions: Sequence[VersionSpan]
    dispatched: str | None
    parts: Sequence[PartView]
    payloads: Sequence[PayloadView]
    discarded_by: int | None


class FailedTurn(msgspec.Struct, frozen=True):
    """A turn without a commit. `kept_bytes` of a rejected reply are stored, unless freed since."""

    turn: int
    fence: int
    opened_at: float | None
    ended_at: float
    reason: str
    status: int | None
    detail: str | None
    kind: Literal["rejected", "abandoned"]
    reply_bytes: int | None = None
    kept_bytes: int | None = None


class OpenTurnView(msgspec.Struct, frozen=True):
    turn: int
    parent: int
    fence: int
    incarnation: int
    adapter: str | None
    opened_at: float


class Rollback(msgspec.Struct, frozen=True):
    seq: int
    at: float
    to_turn: int
    discarded: Sequence[int]


class ViewProblem(msgspec.Struct, frozen=True):
    """A part of the session that cannot be read, and why."""

    part: str
    message: str


class SessionView(msgspec.Struct, frozen=True):
    """A session's state after event `seq` of `last_seq`. Times are seconds since the epoch.

    `tree` is null where there is at most one branch.
    """

    session_id: str
    seq: int
    last_seq: int
    status: str
    state: SessionState
    erased: bool
    config: Mapping[str, Any]
    fork: ForkRef | None
    metadata: msgspec.Raw | None
    created_at: float
    closed_at: float | None
    reward: Mapping[str, Any] | None
    turn_rewards: Mapping[str, Mapping[str, Any]]
    note: str | None
    tags: Sequence[str]
    affinity: Mapping[str, Any] | None
    open_turns: Sequence[OpenTurnView]
    tree: Tree | None
    turns: Sequence[TurnView]
    failed: Sequence[FailedTurn]
    rollbacks: Sequence[Rollback]
    problems: Sequence[ViewProblem]


class SessionViews:
    """Reads session views. `at_gates` returns the turns that wait at gates."""

    def __init__(self, database: Database, at_gates: AtGates) -> None:
        self._database = database
        self._at_gates = at_gates

    async def at(self, session_id: str, seq: int | None) -> SessionView:
        """The session after event `seq` (None: the last). Raises as `session_at`."""
        state = await session_at(self._database, session_id, seq)
        problems = [] if state.damage is None else [ViewProblem("log", state.damage)]
        metadata = await self._metadata(state.session, problems)
        is_at_gate = state.session.version == state.last_seq and session_id in self._at_gates()
        if len(state.events) <= INLINE:
            return _view(state, metadata, problems, is_at_gate=is_at_gate)
        return await asyncio.to_thread(_view, state, metadata, problems, is_at_gate=is_at_gate)

    async def _metadata(self, session: Session, problems: list[ViewProblem]) -> msgspec.Raw | None:
        """The metadata; None if there is none, or if it was erased or is damaged (then with a problem added)."""
        blob = session.metadata
        if blob is None or session.status == "erased":
            return None
        try:
            by_session = await self._database.read(
                lambda c: reads.load_blobs(c, session.session_id, [blob.number]), session_id=session.session_id
            )
        except (CorruptContent, SessionUnreadable) as error:
            problems.append(ViewProblem("metadata", str(error)))
            return None
        return msgspec.Raw(by_session[blob.number])


def _view(
    state: SessionAt, metadata: msgspec.Raw | None, problems: Sequence[ViewProblem], *, is_at_gate: bool
) -> SessionView:
    session = state.session
    discarded_by = {
        turn: recorded.seq
        for recorded in state.events
        if isinstance(recorded.event, RolledBack)
        for turn in recorded.event.discarded
    }
    return SessionView(
        session_id=session.session_id,
        seq=session.version,
        last_seq=state.last_seq,
        status=session.status,
        state=_state(session, is_at_gate),
        erased=session.status == "erased",
        config=asdict(session.config),
        fork=session.fork,
        metadata=metadata,
        created_at=session.created_at,
        closed_at=session.closed_at,
        reward=None if session.reward is None else asdict(session.reward),
        turn_rewards={str(turn): asdict(reward) for turn, reward in session.turn_rewards.items()},
        note=session.note,
        tags=session.tags,
        affinity=None if session.affinity is None else asdict(session.affinity),
        open_turns=[_open_turn(state, held) for held in session.open_turns.values()],
        tree=tree_of(state) if session.branches > 1 else None,
        turns=[
            _turn(state, recorded, recorded.event, discarded_by)
            for recorded in state.events
            if isinstance(recorded.event, TurnCommitted)
        ],
        failed=[
            _failed(state, recorded, recorded.event)
            for recorded in state.events
            if isinstance(recorded.event, TurnRejected | TurnAbandoned)
        ],
        rollbacks=[
            Rollback(recorded.seq, recorded.at, recorded.event.to_turn, recorded.event.discarded)
            for recorded in state.events
            if isinstance(recorded.event, RolledBack)
        ],
        problems=problems,
    )


def _state(session: Session, is_at_gate: bool) -> SessionState:
    if session.status != "open":
        return session.status
    if is_at_gate:
        return "paused"
    return "running" if session.open_turns else "idle"


def _opened_at(state: SessionAt, fence: int) -> float | None:
    """When the claim with this fence was taken, in seconds since the epoch; None if unknown."""
    opened = state.events[fence - 1] if 0 < fence <= len(state.events) else None
    return opened.at if opened is not None and isinstance(opened.event, TurnOpened) else None


def _open_turn(state: SessionAt, held: OpenTurn) -> OpenTurnView:
    opened_at = state.events[held.fence - 1].at
    return OpenTurnView(held.turn, held.parent, held.fence, held.incarnation, held.adapter, opened_at)


def _turn(state: SessionAt, recorded: Recorded, event: TurnCommitted, discarded_by: Mapping[int, int]) -> TurnView:
    readable = {payload.kind for payload in state.session.whole_payloads(event.turn)}
    return TurnView(
        **{name: getattr(event, name) for name in _OF_EVENT},
        live=event.turn not in discarded_by,
        opened_at=_opened_at(state, event.fence),
        committed_at=recorded.at,
        seq=recorded.seq,
        timing=None
        if event.timing is None
        else StageTimes(*(microseconds / 1000 for microseconds in msgspec.structs.astuple(event.timing))),
        prompt_tokens=event.base_tokens + event.suffix_tokens,
        messages=event.base_messages + event.new_messages + 1,
        parts=[PartView(part.engine, part.start, part.end) for part in event.parts],
        payloads=[PayloadView(ref.kind, ref.stop - ref.start, ref.kind not in readable) for ref in event.payloads],
        discarded_by=discarded_by.get(event.turn),
    )


_SHOWN_ELSE = {"timing", "parts", "payloads"}
_OF_EVENT = [n for n in TurnView.__struct_fields__ if n in TurnCommitted.__struct_fields__ and n not in _SHOWN_ELSE]


def _failed(state: SessionAt, recorded: Recorded, event: TurnRejected | TurnAbandoned) -> FailedTurn:
    opened_at = _opened_at(state, event.fence)
    if isinstance(event, TurnAbandoned):
        return FailedTurn(event.turn, event.fence, opened_at, recorded.at, event.reason, None, None, "abandoned")
    return FailedTurn(
        turn=event.turn,
        fence=event.fence,
        opened_at=opened_at,
        ended_at=recorded.at,
        reason=event.reason,
        status=event.status,
        detail=event.detail,
        kind="rejected",
        reply_bytes=event.reply_bytes,
        kept_bytes=event.kept_bytes,
    )
