"""The points at which a feature takes part in a turn: lists that are filled when the services are
made, and called with the turn. With an empty list a line does nothing; nothing is asked in a turn
that was decided at start-up.

    read ─▶ [before_claim] ─▶ claim [limits] ─▶ [claimed] ─▶ [around_engine: ([before_engine] ─▶ place [placing] ─▶
        [streaming] ─▶ [may_send] ─▶ engine ─▶ validate)] ─▶ [chunks] ─▶ commit [limits] ─▶ [ended] ─▶ reply

What a feature keeps of a turn is in `InFlightTurn.features`, under its name. Closes, erasures and the
like are told by `Sessions` and `Erasure`, since they are no part of a turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from app.domain.rules import Plan
from app.domain.session import Session
from app.errors import AppError, OverBudget
from app.store.log import StoredChunk
from app.store.log_turns import Claim, Commit, Limited, Release
from app.turn.in_flight import Claimed, EngineCall, EngineChoice, Generated, InFlightTurn, Placed
from app.upstream.client import EngineReply

Gate = Callable[[InFlightTurn], Callable[[InFlightTurn], Awaitable[None]] | None]
"""What a turn asks before it goes on: None where it may at once, else what waits until it may."""

Generate = Callable[[Claimed, EngineCall], Awaitable[Generated | EngineReply]]
"""Has an engine generate a prepared turn; an answer that is no completion is the engine's own error."""


class SessionLimits(Protocol):
    """Holds the turns of sessions that have limits to these (budgets)."""

    async def claiming(self, placed: Placed, plan: Plan, session: Session, claim: Claim) -> Claim:
        """The claim that also reserves what the turn may use. Raises InvalidRequest, StoreUnavailable."""
        ...

    async def require_left(self, session: Session) -> None:
        """Raises OverBudget, StoreUnavailable."""

    async def refused(self, placed: Placed, outcome: Limited) -> AppError | None:
        """The error of a turn that was not claimed, once the log has it; None if it is to be tried again. Raises
        StoreUnavailable, StoreFull."""
        ...

    def claimed(self, turn: Claimed) -> None:
        """The turn has its claim: its request asks for no more than that."""

    async def around(self, generate: Generate, turn: Claimed, call: EngineCall) -> Generated | EngineReply:
        """Generate within the limits. Raises as `generate`, OverBudget."""
        ...

    def is_late(self, turn: Claimed) -> bool:
        """Is the turn's time over? What an engine ends then is not continued."""
        ...

    def committing(self, turn: Claimed, commit: Commit) -> Commit:
        """The commit that also counts what the turn has used."""
        ...

    def ending(self, turn: Claimed, release: Release, error: OverBudget) -> Release:
        """The release of a turn that a limit has ended."""
        ...


class TurnPoints:
    """The lists, each in the order in which its functions are called."""

    def __init__(self) -> None:
        self.before_claim: list[Gate] = []
        """Before a turn takes a claim, and after the request was found to be a new turn: while it
        waits here it holds nothing, and it is cancelled if its clients leave. Gates."""

        self.limits: SessionLimits | None = None
        """Holds the turns of sessions that have limits to these. Budgets."""

        self.held_runs: dict[str, str] = {}
        """Runs that take no new turns, and what their error says. Runs."""

        self.claimed: list[Callable[[Claimed], None]] = []
        """The turn has its claim. Whatever happens from now on, `ended` is called. Session control."""

        self.around_engine: list[Callable[[Generate, Claimed, EngineCall], Awaitable[Generated | EngineReply]]] = []
        """Around the generation of a prepared turn: each gets the one before it, the first the plain
        one, which asks an engine and validates its reply. Resume: staged tokens, aborted parts."""

        self.before_engine: list[Gate] = []
        """Before an engine is chosen: as `before_claim`, but the turn holds its claim. Gates."""

        self.placing: list[Callable[[Claimed, EngineChoice], Awaitable[None]]] = []
        """The engines to try are chosen, and the client has its own say: the choice may be changed. Session
        control."""

        self.streaming: list[Callable[[Claimed, EngineCall], None]] = []
        """The first request of a turn whose client wants a stream is about to be sent: what it asks for
        may be changed. Live streams."""

        self.may_send: list[Callable[[InFlightTurn], bool]] = []
        """The last moment, when a connection to the engine is there; False takes the turn back to
        `before_engine`. Gates."""

        self.chunks: list[Callable[[str, int, Sequence[StoredChunk]], Awaitable[Sequence[StoredChunk]]]] = []
        """Before a commit that has new chunks of replay payloads: gets the session, the fence and the
        chunks, and returns them as the commit is to write them. Objects."""

        self.ended: list[Callable[[Claimed], None]] = []
        """A turn that had its claim has ended in any way; a fault here is logged and counted. Session
        control, spans."""
