"""Which engine a session's turns go to.

A session keeps its engine, which has its prefix cached, while it is used. The binding is an event, written in the
commit of the first turn there. Any engine can continue from the stored history, so a lost engine costs only a prefill.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from app.domain.events import AffinityBound, AffinityReleased
from app.domain.session import Session
from app.errors import SessionUnreadable
from app.fleet.engines import Engines
from app.sessions.cache import SessionCache
from app.settings import Settings
from app.turn.in_flight import AwayCause, Claimed, EngineChoice

log = logging.getLogger("turnlog.placement")

Clock = Callable[[], float]


class Placement:
    """`clock` gives seconds since the epoch."""

    def __init__(self, engines: Engines, cache: SessionCache, settings: Settings, clock: Clock) -> None:
        self._engines = engines
        self._cache = cache
        self._ttl_s = settings.affinity_ttl_s
        self._clock = clock

    async def place(self, turn: Claimed) -> EngineChoice:
        """The engines to try. Raises NoUpstream, StoreUnavailable."""
        session = turn.session
        run, affinity = session.config.of_run, session.affinity
        away: AwayCause | None = None
        if affinity is None:
            parent = session.config.parent
            preferred = None if parent is None else await self._engine_of(parent)
        # A binding that a client controls has its own time to live.
        elif affinity.control is None and self._ttl_s is not None and self._clock() - turn.idle_since > self._ttl_s:
            preferred, away = None, "expired"
        else:
            preferred, away = affinity.engine, self._engines.why_unavailable(affinity.engine, run)
        return EngineChoice(self._engines.order(run, session.session_id, preferred), away)

    async def _engine_of(self, session_id: str) -> str | None:
        """The engine of a sub-agent's parent: their prompts share a prefix. Raises StoreUnavailable."""
        try:
            entry = await self._cache.current(session_id)
        except SessionUnreadable as error:
            log.warning("a sub-agent is placed without its parent's engine: %s", error)
            return None
        return None if entry is None or entry.session.affinity is None else entry.session.affinity.engine

    def binding(
        self, choice: EngineChoice | None, session: Session, engine: str
    ) -> AffinityBound | AffinityReleased | None:
        """The binding event for the engine that answered; None if the session is bound to it already, or if no engine
        was chosen: a text upstream is.

        If the first choice did not answer, it refused the connection: the cause is `dead`.
        """
        if choice is None:
            return None
        if choice.control is not None:
            return choice.control.binding(session, engine)
        affinity = session.affinity
        if affinity is None:
            return AffinityBound(engine)
        if engine == affinity.engine:
            return None
        return AffinityBound(engine, choice.away or "dead", affinity.control)
