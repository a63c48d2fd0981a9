"""Memory of request bodies: the limit of all, the share of a session, and that of an address for incomplete bodies."""

from __future__ import annotations

import contextlib

import pytest

from app.errors import BodyGivenUp, Overloaded
from app.request_memory import BODY_TIMEOUT_S, SMALL, BodyReservation, RequestMemory

LIMIT = 64 * SMALL


class Held:
    """Bodies that began one second after the other at a clock of its own, and which of them were given up."""

    def __init__(self, *bodies: tuple[str, str, int]) -> None:
        self.now = 100.0
        self.inflight = RequestMemory(LIMIT, clock=lambda: self.now)
        self.given_up: list[str] = []
        self.stack = contextlib.ExitStack()
        self.rooms = {name: self.begin(name, peer, size) for name, peer, size in bodies}

    def begin(self, name: str, peer: str, size: int) -> BodyReservation:
        room = self.stack.enter_context(self.inflight.reserve(name, peer))
        room.begin(lambda: self.given_up.append(name))
        room.arrive(size)
        self.now += 1
        return room

    def end(self) -> None:
        self.stack.close()
        assert self.inflight.size == 0
        assert not self.inflight.peers
        assert not self.inflight.sessions
        assert not self.inflight.arriving


def test_all_bodies_together_have_a_limit() -> None:
    inflight = RequestMemory(LIMIT)
    with inflight.reserve() as room, inflight.reserve() as other:
        room.arrive(LIMIT - 10)
        other.grow(10)
        for more in (other.grow, other.arrive):
            with pytest.raises(Overloaded):
                more(1)
    assert inflight.size == 0
    with RequestMemory(LIMIT, LIMIT - 1).reserve("s", "p") as largest:
        largest.arrive(LIMIT - 1)  # One request of the largest size is never too much for a share.


@pytest.mark.threat("unfinished bodies fill the memory for bodies")
def test_a_session_has_a_share_whatever_became_of_its_bodies() -> None:
    inflight = RequestMemory(LIMIT)
    with inflight.reserve("s", "p") as room, inflight.reserve("s", "q") as same, inflight.reserve("t", "p") as other:
        room.arrive(LIMIT // 4)
        room.arrived()
        same.arrive(SMALL)
        with pytest.raises(Overloaded):
            same.arrive(1)
        other.arrive(LIMIT // 4)
        same.grow(LIMIT // 4)
    with inflight.reserve("s") as again:
        again.arrive(LIMIT // 4)
    assert inflight.size == 0


@pytest.mark.threat("unfinished bodies fill the memory for bodies")
def test_an_address_has_a_share_of_what_has_not_ended() -> None:
    """All harnesses may be behind one address: what is whole is not its share, nor is what is small."""
    inflight = RequestMemory(LIMIT)
    rooms = [inflight.reserve(None, "p") for _ in range(5)]
    with (
        rooms[0] as first,
        rooms[1] as second,
        rooms[2] as third,
        rooms[3] as small,
        inflight.reserve(None, "q") as far,
    ):
        first.arrive(LIMIT // 4)
        second.arrive(LIMIT // 4)
        with pytest.raises(Overloaded):
            third.arrive(SMALL + 1)
        small.arrive(SMALL)
        far.arrive(LIMIT // 8)
        first.arrived()
        third.arrive(LIMIT // 8)
    assert inflight.size == 0


EIGHTH = LIMIT // 8
FULL_SHARE = [*((name, "p", EIGHTH) for name in "abcd"), ("far", "q", SMALL)]
FULL = [(name, name, EIGHTH) for name in "abcdefgh"]


@pytest.mark.threat("unfinished bodies fill the memory for bodies")
@pytest.mark.parametrize(
    ("bodies", "size", "given_up"),
    [
        (FULL_SHARE, SMALL + 1, ["a"]),
        (FULL_SHARE, EIGHTH, ["a"]),
        (FULL_SHARE, EIGHTH + 1, ["a", "b"]),
        (FULL, 1, ["a"]),
        (FULL, EIGHTH + 1, ["a", "b"]),
        ([("tiny", "p", 1), *FULL_SHARE[:3], ("d", "p", EIGHTH - 1)], SMALL + 1, ["a"]),
        ([("a", "q", EIGHTH), ("b", "p", 2 * EIGHTH), ("c", "p", 2 * EIGHTH)], EIGHTH, ["b"]),
        ([(str(number), "p", SMALL) for number in range(64)], 3, ["0"]),
    ],
    ids=["share", "share exactly", "two of a share", "all", "two of all", "large first", "of the address", "small"],
)
def test_what_has_been_arriving_for_long_makes_room(
    bodies: list[tuple[str, str, int]], size: int, given_up: list[str]
) -> None:
    held = Held(*bodies)
    held.now += BODY_TIMEOUT_S
    held.begin("new", "p", size)
    assert held.given_up == given_up
    for name in given_up:
        with pytest.raises(BodyGivenUp):
            held.rooms[name].arrive(0)
    held.end()


def test_a_reply_finds_room_as_a_body_does() -> None:
    """Whatever is held back: its turn has cost an engine its time."""
    held = Held(*FULL[1:])
    turn = held.begin("turn", "p", EIGHTH)
    turn.arrived()
    held.now += BODY_TIMEOUT_S
    turn.grow(EIGHTH)
    assert held.given_up == ["b"]
    held.end()


@pytest.mark.parametrize("bodies", [FULL_SHARE, FULL], ids=["share", "all"])
def test_many_that_send_at_once_do_not_throw_each_other_out(bodies: list[tuple[str, str, int]]) -> None:
    """Nor does what began earlier throw out what began later."""
    held = Held(*bodies)
    held.now = held.rooms["a"].since + BODY_TIMEOUT_S
    with pytest.raises(Overloaded):
        held.begin("new", "p", SMALL + 1)
    assert held.given_up == []
    held.now += BODY_TIMEOUT_S
    with pytest.raises(Overloaded):
        held.rooms["a"].arrive(1)
    held.rooms["b"].arrive(1)
    assert held.given_up == ["a"]
    held.end()


def test_nothing_is_given_up_in_vain() -> None:
    """Where all that has been held for long is not enough, or has ended, who comes is refused."""
    held = Held(*FULL_SHARE)
    held.now = held.rooms["a"].since + BODY_TIMEOUT_S + 0.5
    with pytest.raises(Overloaded):
        held.begin("new", "p", EIGHTH + 1)
    held = Held(*FULL)
    for room in held.rooms.values():
        room.arrived()
    held.now += BODY_TIMEOUT_S
    with pytest.raises(Overloaded):
        held.begin("new", "p", 1)
    assert held.given_up == []
    held.end()
