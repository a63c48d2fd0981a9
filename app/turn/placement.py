"""Which engine a session's turns go to.

A session keeps its engine, which has its prefix cached, while it is used. The binding is an event, written in the
commit of the first turn there. Any engine can continue from the stored history, so a lost engine costs only a prefill.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from app.domain.events import AffinityBound, AffinityReleased
from app.domain.session import Affinity, Session
from app.errors import SessionUnreadable
from app.fleet.engines import EngineOrder, Engines
from app.sessions.cache import SessionCache
from app.settings import Settings

if TYPE_CHECKING:
    from app.turn.session_control import ControlledTurn

log = logging.getLogger("turnlog.placement")

Clock = Callable[[], float]


AwayCause = Literal["listed", "draining", "dead", "expired"]


class EngineChoice(msgspec.Struct, frozen=True):
    """Engines in the order in which a turn tries them; `away` says why the session's own engine is not the first.

    `control` is set if the client chose the engine (`nvext.session_control`).
    """

    order: EngineOrder
    away: AwayCause | None = None
    control: ControlledTurn | None = None


class Placement:
    """`clock` gives seconds since the epoch."""

    def __init__(self, engines: Engines, cache: SessionCache, settings: Settings, clock: Clock) -> None:
        self._engines = engines
        self._cache = cache
        self._ttl_s = settings.affinity_ttl_s
        self._clock = clock

    async def place(self, session: Session, idle_since: float) -> EngineChoice:
        """`idle_since`: time of the session's last event. Raises NoUpstream, StoreUnavailable."""
        affinity = session.affinity
        if affinity is None:
            parent = session.config.parent
            preferred = None if parent is None else await self._engine_of(parent)
            return EngineChoice(self._engines.order(session.session_id, preferred))
        if self._is_expired(affinity, idle_since):
            return EngineChoice(self._engines.order(session.session_id), "expired")
        order = self._engines.order(session.session_id, affinity.engine)
        return EngineChoice(order, self._engines.why_unavailable(affinity.engine))

    async def _engine_of(self, session_id: str) -> str | None:
        """The engine of a sub-agent's parent: their prompts share a prefix. Raises StoreUnavailable."""
        try:
            entry = await self._cache.current(session_id)
        except SessionUnreadable as error:
            log.warning("a sub-agent is placed without its parent's engine: %s", error)
            return None
        return None if entry is None or entry.session.affinity is None else entry.session.affinity.engine

    def _is_expired(self, affinity: Affinity, idle_since: float) -> bool:
        """A binding that a client controls has its own time to live."""
        return affinity.control is None and self._ttl_s is not None and self._clock() - idle_since > self._ttl_s

    def binding(self, session: Session, choice: EngineChoice, engine: str) -> AffinityBound | AffinityReleased | None:
        """The binding event for the engine that answered; None if the session is bound to it already.

        If the first choice did not answer, it refused the connection: the cause is `dead`.
        """
        if choice.control is not None:
            return choice.control.binding(session, engine)
        affinity = session.affinity
        if affinity is None:
            return AffinityBound(engine)
        if engine == affinity.engine:
            return None
        return AffinityBound(engine, choice.away or "dead", affinity.control)
