"""Which engine a session's turns go to, and how long it stays there.

A session keeps its engine, which has its prefix in its cache, while it is used: the binding is an event, written with
the commit of the turn that was the first there. Any engine can go on from the stored history, so an engine that is gone
costs a prefill and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from app.domain.events import AffinityBound, AffinityReleased
from app.domain.session import Affinity, Session
from app.errors import SessionUnreadable
from app.fleet.engines import Engines, Order
from app.sessions.cache import SessionCache
from app.settings import Settings
from app.turn.claims import ClaimedTurn

log = logging.getLogger("turnlog.placement")

Clock = Callable[[], float]

Cause = Literal["listed", "draining", "dead", "expired"]


class ClientControl(Protocol):
    """A client's own word on where its turn goes (`service.session_control`)."""

    async def prepare(self, engine: str) -> None:
        """The turn is about to be sent to this engine."""
        ...

    def binding(self, session: Session, engine: str) -> AffinityBound | AffinityReleased | None: ...


class EngineChoice(msgspec.Struct, frozen=True):
    """Engines in the order in which a turn tries them; `away` says why the session's own is not the first of them.

    `control` has made the order, where a client has its say.
    """

    order: Order
    away: Cause | None = None
    control: ClientControl | None = None


class Placement:
    """`clock` gives seconds since the epoch."""

    def __init__(self, engines: Engines, cache: SessionCache, settings: Settings, clock: Clock) -> None:
        self._engines = engines
        self._cache = cache
        self._ttl_s = settings.affinity_ttl_s
        self._clock = clock

    async def place(self, opening: ClaimedTurn) -> EngineChoice:
        """Raises NoUpstream, StoreUnavailable."""
        session, affinity = opening.session, opening.session.affinity
        if affinity is None:
            parent = session.config.parent
            near = None if parent is None else await self._engine_of(parent)
            return EngineChoice(self._engines.order(session.session_id, near))
        if self._is_expired(affinity, opening.idle_since):
            return EngineChoice(self._engines.order(session.session_id), "expired")
        order = self._engines.order(session.session_id, affinity.engine)
        return EngineChoice(order, self._engines.why_not(affinity.engine))

    async def _engine_of(self, session_id: str) -> str | None:
        """A sub-agent's first prompt is mostly its parent's: so is its engine. Raises StoreUnavailable."""
        try:
            live = await self._cache.current(session_id)
        except SessionUnreadable as error:
            log.warning("a sub-agent is placed without regard to its parent: %s", error)
            return None
        return None if live is None or live.session.affinity is None else live.session.affinity.engine

    def _is_expired(self, affinity: Affinity, idle_since: float) -> bool:
        """One that a client controls has a time to live of its own."""
        return affinity.control is None and self._ttl_s is not None and self._clock() - idle_since > self._ttl_s

    def binding(self, session: Session, place: EngineChoice, engine: str) -> AffinityBound | AffinityReleased | None:
        """What a commit says of the engine that answered; None where that is the one the session has.

        An engine that was to be the first and is not the one that answered refused the connection: it is `dead`.
        """
        if place.control is not None:
            return place.control.binding(session, engine)
        affinity = session.affinity
        if affinity is None:
            return AffinityBound(engine)
        if engine == affinity.engine:
            return None
        return AffinityBound(engine, place.away or "dead", affinity.control)
