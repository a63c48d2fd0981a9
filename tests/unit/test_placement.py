"""Where a session's next turn goes, and what its commit says of that."""

from __future__ import annotations

from typing import Any

import pytest
from unit.making import claimed

from app.domain.events import AffinityBound, SessionConfig
from app.domain.fleet import EngineListed
from app.domain.session import Affinity, Session
from app.errors import SessionUnreadable
from app.fleet.engines import Engines
from app.sessions.cache import CacheEntry
from app.settings import Settings
from app.turn.in_flight import EngineChoice
from app.turn.placement import Placement

pytestmark = pytest.mark.anyio

A, B, C = "http://a", "http://b", "http://c"
TTL_S = 100.0


def session(name: str = "s", affinity: Affinity | None = None, parent: str | None = None) -> Session:
    config = SessionConfig(rollback_window=1, parent=parent)
    return Session(name, 1, "open", config, "", 0.0, 0.0, affinity=affinity)


class Others:
    """The parents that a sub-agent may have; an id with a `!` is damaged."""

    def __init__(self, *sessions: Session) -> None:
        self._sessions = {one.session_id: CacheEntry(one) for one in sessions}

    async def current(self, session_id: str) -> CacheEntry | None:
        if "!" in session_id:
            raise SessionUnreadable(f"session {session_id} is damaged")
        return self._sessions.get(session_id)


class Placed:
    """A placement over three engines, at a time of the test's choosing."""

    def __init__(self, *parents: Session, ttl_s: float | None = TTL_S, **settings: Any) -> None:
        self.now = 1000.0
        self.engines = Engines(None)  # type: ignore[arg-type]
        self.engines.serve([EngineListed(url) for url in (A, B, C)])
        self._placement = Placement(
            self.engines,
            Others(*parents),  # type: ignore[arg-type]
            Settings(affinity_ttl_s=ttl_s, **settings),
            lambda: self.now,
        )

    async def place(self, of: Session, idle_s: float = 0.0) -> EngineChoice:
        return await self._placement.place(claimed(of, idle_since=self.now - idle_s))

    async def bound(self, of: Session, answered: str | None = None, idle_s: float = 0.0) -> AffinityBound | None:
        """What is written where `answered`, or else the first one, has answered."""
        place = await self.place(of, idle_s)
        return self._placement.binding(place, of, answered or place.order.first)


async def test_the_first_turn_binds() -> None:
    placed = Placed()
    placed.engines.members[A].in_flight = placed.engines.members[C].in_flight = 1
    assert (await placed.place(session())).order.first == B
    assert await placed.bound(session()) == AffinityBound(B)


@pytest.mark.parametrize(
    ("affinity", "ttl_s", "idle_s", "stays"),
    [
        (Affinity(A), TTL_S, 0.0, True),
        (Affinity(A), TTL_S, TTL_S, True),
        (Affinity(A), TTL_S, TTL_S + 1, False),
        (Affinity(A), None, 1e9, True),
        (Affinity(A, "of a client"), TTL_S, 1e6, True),
    ],
)
async def test_a_bound_session_stays_and_says_nothing_for_its_time_to_live(
    affinity: Affinity, ttl_s: float | None, idle_s: float, stays: bool
) -> None:
    """Which counts from the last use, and not for what a client controls."""
    placed, of = Placed(ttl_s=ttl_s), session(affinity=affinity)
    placed.engines.members[A].in_flight = 99
    assert ((await placed.place(of, idle_s)).order.first == A) is stays
    moved = await placed.bound(of, idle_s=idle_s)
    assert (moved is None) is stays
    assert moved is None or (moved.engine in (B, C), moved.cause) == (True, "expired")
    assert await placed.bound(of, A, idle_s=idle_s) is None


@pytest.mark.parametrize("control", [None, "dynamo-1"])
@pytest.mark.parametrize("cause", ["listed", "draining", "dead"])
async def test_why_a_session_leaves_its_engine(cause: str, control: str | None) -> None:
    placed, of = Placed(), session(affinity=Affinity(A, control))
    if cause == "listed":
        placed.engines.serve([EngineListed(B), EngineListed(C)])
    elif cause == "draining":
        placed.engines.serve([EngineListed(A, "draining"), EngineListed(B), EngineListed(C)])
    else:
        placed.engines.members[A].health = "dead"
    moved = await placed.bound(of)
    assert moved is not None
    assert (moved.engine in (B, C), moved.cause, moved.control) == (True, cause, control)


async def test_the_cause_is_that_of_the_time_of_placing() -> None:
    """What an operator does while the engine works was not the reason; an engine that refuses during the turn is."""
    placed, of = Placed(), session(affinity=Affinity(A))
    assert await placed.bound(of, B) == AffinityBound(B, "dead")
    placed.engines.members[A].health = "dead"
    place = await placed.place(of)
    placed.engines.serve([EngineListed(B), EngineListed(C)])
    assert placed._placement.binding(place, of, B) == AffinityBound(B, "dead")


async def test_the_last_engine_is_better_than_none_and_keeps_its_sessions() -> None:
    placed, of = Placed(), session(affinity=Affinity(A))
    placed.engines.serve([EngineListed(A, "draining")])
    assert list((await placed.place(of)).order) == [A]
    assert await placed.bound(of) is None


@pytest.mark.parametrize("placement", ["least_loaded", "hash"])
async def test_a_sub_agent_begins_where_its_parent_is_and_stays_where_it_is(placement: str) -> None:
    placed = Placed(session("parent", Affinity(C)), placement=placement)
    placed.engines.members[C].in_flight = 99
    of = session("child", parent="parent")
    assert await placed.bound(of) == AffinityBound(C)
    assert (await placed.place(session("child", Affinity(B), parent="parent"))).order.first == B
    placed.engines.members[C].health = "dead"
    assert list((await placed.place(of)).order)[-1] == C


@pytest.mark.parametrize("parent", ["unbound", "never-seen", "damaged!"])
async def test_a_parent_without_an_engine_does_not_matter(parent: str) -> None:
    placed = Placed(session("unbound"))
    alone = await placed.place(session("child"))
    assert list((await placed.place(session("child", parent=parent))).order) == list(alone.order)
