"""The room that bodies have: all of them together, a session's share, and an address's for what has not ended."""

from __future__ import annotations

import pytest

from app.errors import Overloaded
from app.http.limits import SMALL, Inflight

LIMIT = 64 * SMALL


def test_all_bodies_together_have_a_limit() -> None:
    inflight = Inflight(LIMIT)
    with inflight.room() as room, inflight.room() as other:
        room.arrive(LIMIT - 10)
        other.grow(10)
        with pytest.raises(Overloaded):
            other.grow(1)
        with pytest.raises(Overloaded):
            other.arrive(1)
    assert inflight.size == 0


@pytest.mark.threat("bodies whose ends are held back take all the room that there is for bodies")
def test_a_session_has_a_share_whatever_became_of_its_bodies() -> None:
    inflight = Inflight(LIMIT)
    with inflight.room("s", "p") as room, inflight.room("s", "q") as same, inflight.room("t", "p") as other:
        room.arrive(LIMIT // 4)
        room.arrived()
        same.arrive(SMALL)
        with pytest.raises(Overloaded):
            same.arrive(1)
        other.arrive(LIMIT // 4)
        same.grow(LIMIT // 4)
    with inflight.room("s") as again:
        again.arrive(LIMIT // 4)
    assert inflight.size == 0


@pytest.mark.threat("bodies whose ends are held back take all the room that there is for bodies")
def test_an_address_has_a_share_of_what_has_not_ended() -> None:
    """All harnesses may be behind one address: what is whole is not its share, nor is what is small."""
    inflight = Inflight(LIMIT)
    rooms = [inflight.room(None, "p") for _ in range(5)]
    with rooms[0] as first, rooms[1] as second, rooms[2] as third, rooms[3] as small, inflight.room(None, "q") as far:
        first.arrive(LIMIT // 4)
        second.arrive(LIMIT // 4)
        with pytest.raises(Overloaded):
            third.arrive(SMALL + 1)
        small.arrive(SMALL)
        far.arrive(LIMIT // 8)
        first.arrived()
        third.arrive(LIMIT // 8)
    assert inflight.size == 0


def test_one_request_of_the_largest_size_is_never_too_much_for_a_share() -> None:
    inflight = Inflight(LIMIT, LIMIT - 1)
    with inflight.room("s", "p") as room:
        room.arrive(LIMIT - 1)


def test_nobody_is_remembered() -> None:
    inflight = Inflight(LIMIT)
    for name in ("a", "b"):
        with inflight.room(name, name) as room:
            room.arrive(5)
    assert not inflight._sessions
    assert not inflight._peers
