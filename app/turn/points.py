"""The points at which a feature takes part in a turn: lists that are filled when the services are
made, and called with the turn. With an empty list a line does nothing; nothing is asked in a turn
that was decided at start-up.

    read ─▶ [before_claim] ─▶ claim [limits] ─▶ [claimed] ─▶ [around_engine: ([before_engine] ─▶ place ─▶ [streaming] ─▶
        [may_send] ─▶ engine ─▶ validate)] ─▶ [chunks] ─▶ commit ─▶ [ended] ─▶ reply

A feature's own state of a turn is an attribute of `InFlightTurn`, set at a point of its own. Closes,
erasures and the like are told by `Sessions` and `Erasure`, since they are no part of a turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from app.store.log import StoredChunk
from app.turn.in_flight import EngineCall, InFlightTurn, SessionLimits

Gate = Callable[[InFlightTurn], Callable[[InFlightTurn], Awaitable[None]] | None]
"""What a turn asks before it goes on: None where it may at once, else what waits until it may."""

Generate = Callable[[InFlightTurn], Awaitable[None]]
"""Sets `answer`, and `reply` if the engine's reply is a completion."""


class TurnPoints:
    """The lists, each in the order in which its functions are called."""

    def __init__(self) -> None:
        self.before_claim: list[Gate] = []
        """Before a turn takes a claim, and after the request was found to be a new turn: while it
        waits here it holds nothing, and it is cancelled if its clients leave. Gates."""

        self.limits: SessionLimits | None = None
        """Holds the turns of sessions that have limits to these. Budgets."""

        self.claimed: list[Callable[[InFlightTurn], None]] = []
        """The turn has its claim. Whatever happens from now on, `ended` is called. Session control."""

        self.around_engine: list[Callable[[Generate, InFlightTurn], Awaitable[None]]] = []
        """Around the generation of a prepared turn: each gets the one before it, the first the plain
        one, which asks an engine and validates its reply. Resume: staged tokens, aborted parts."""

        self.before_engine: list[Gate] = []
        """Before an engine is chosen: as `before_claim`, but the turn holds its claim. Gates."""

        self.streaming: list[Callable[[InFlightTurn, EngineCall], None]] = []
        """The first request of a turn whose client wants a stream is about to be sent: what it asks for
        may be changed. Live streams."""

        self.may_send: list[Callable[[InFlightTurn], bool]] = []
        """The last moment, when a connection to the engine is there; False takes the turn back to
        `before_engine`. Gates."""

        self.chunks: list[Callable[[str, int, Sequence[StoredChunk]], Awaitable[Sequence[StoredChunk]]]] = []
        """Before a commit that has new chunks of replay payloads: gets the session, the fence and the
        chunks, and returns them as the commit is to write them. Objects."""

        self.ended: list[Callable[[InFlightTurn], None]] = []
        """A turn that had its claim has ended in any way; a fault here is logged and counted. Session
        control, spans."""
