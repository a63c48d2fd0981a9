"""Which engine a session's turns go to, and how long it stays there.

A session keeps its engine, which has its prefix in its cache, while it is used: the binding is an event, written with
the commit of the turn that was the first there. Any engine can go on from the stored history, so an engine that is gone
costs a prefill and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from app.domain.events import AffinityBound
from app.domain.session import Session
from app.service.cache import SessionCache
from app.service.claims import Opening
from app.settings import Settings
from app.upstream.engines import Engines

Clock = Callable[[], float]

Cause = str


class Place(msgspec.Struct, frozen=True):
    """Engines in the order in which a turn tries them, and what the session is bound to until then."""

    order: tuple[str, ...]
    bound: str | None
    is_expired: bool = False


class Placement:
    """`clock` gives seconds since the epoch."""

    def __init__(self, engines: Engines, cache: SessionCache, settings: Settings, clock: Clock) -> None:
        self._engines = engines
        self._cache = cache
        self._ttl_s = settings.affinity_ttl_s
        self._clock = clock

    async def place(self, opening: Opening) -> Place:
        """Raises NoUpstream."""
        session = opening.session
        bound = None if session.affinity is None else session.affinity.engine
        is_expired = self._is_expired(opening.idle_since)
        near = bound if not is_expired else None
        if bound is None and session.config.parent is not None:
            near = await self._engine_of(session.config.parent)
        return Place(tuple(self._engines.order(session.session_id, near)), bound, is_expired)

    async def _engine_of(self, session_id: str) -> str | None:
        """A sub-agent's first prompt is mostly its parent's: so is its engine."""
        live = await self._cache.get(session_id)
        return None if live is None or live.session.affinity is None else live.session.affinity.engine

    def _is_expired(self, idle_since: float) -> bool:
        return self._ttl_s is not None and self._clock() - idle_since > self._ttl_s

    def binding(self, session: Session, place: Place, engine: str) -> AffinityBound | None:
        """What a commit says of the engine that answered; None where that is the one the session has."""
        if engine == place.bound:
            return None
        if place.bound is None:
            return AffinityBound(engine)
        if place.is_expired:
            return AffinityBound(engine, "expired")
        return AffinityBound(engine, self._engines.why_not(place.bound) or "dead")
