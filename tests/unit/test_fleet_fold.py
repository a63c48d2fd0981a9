"""The fleet as a fold of its log."""

from __future__ import annotations

import pytest

from app.domain.events import decode, encode
from app.domain.fleet import (
    TYPES,
    AdapterPaused,
    AdapterResumed,
    EngineListed,
    FleetEvent,
    FleetPaused,
    FleetResumed,
    Placed,
    VersionRegressed,
    fold,
)

EVENTS: list[FleetEvent] = [
    EngineListed("http://a"),
    AdapterPaused("lora", 1, 700.0),
    FleetPaused(1, 800.0, "retract"),
    EngineListed("http://b", "draining"),
    AdapterResumed("lora", 1, version="7"),
    AdapterPaused("other", 1, 900.0),
    VersionRegressed("http://b", "9", "8"),
    FleetResumed(1, "lease_expired"),
    EngineListed("http://a", "removed"),
    AdapterPaused("lora", 2, 950.0, "7"),
]


PLACED = [Placed(seq, 100.0 + seq, event) for seq, event in enumerate(EVENTS, 1)]


def test_the_last_event_of_each_key_is_the_whole_state() -> None:
    newest = {placed.event.key: placed for placed in PLACED}
    assert fold(sorted(newest.values(), key=lambda placed: placed.seq)) == fold(PLACED)


def test_gates_hold_back_their_own_adapter_or_everybody() -> None:
    states = [fold(PLACED[:count]) for count in range(len(PLACED) + 1)]
    shut = [[state.is_shut(adapter) for adapter in (None, "lora", "other", "unknown")] for state in states]
    nobody, all_of_them = [False] * 4, [True] * 4
    lora, other = [False, True, False, False], [False, False, True, False]
    both = [False, True, True, False]
    assert shut == [nobody, nobody, lora, *[all_of_them] * 5, other, other, both]


def test_closings_only_grow_and_tell_of_an_opening_between() -> None:
    closings = [fold(PLACED[:count]).closings("lora") for count in range(len(PLACED) + 1)]
    assert closings == sorted(closings)
    assert (closings[0], closings[2], closings[4], closings[-1]) == ((0, 0), (0, 1), (1, 1), (1, 2))
    assert fold(PLACED).closings(None) == (1, 0)


def test_a_gate_says_when_it_changed_and_which_weights_it_guards() -> None:
    """The fleet's are those that the last resume named."""
    fleet = fold(PLACED)
    assert (fleet.adapters["lora"].since, fleet.adapters["lora"].version) == (110.0, "7")
    assert (fleet.gate.since, fleet.gate.until, fleet.gate.mode) == (108.0, None, None)
    assert fold(PLACED[:5]).gate.mode == "retract"
    events = [FleetResumed(0, version="41"), FleetPaused(1, 9.0, version="41"), FleetResumed(1)]
    states = [fold(Placed(seq, 1.0, event) for seq, event in enumerate(events[:count], 1)) for count in range(4)]
    assert [state.gate.version for state in states] == [None, "41", "41", None]


def test_it_is_known_whether_turns_were_held_back_lately() -> None:
    shut = fold(PLACED)
    opened = fold(
        [*PLACED, Placed(11, 300.0, AdapterResumed("lora", 2)), Placed(12, 400.0, AdapterResumed("other", 1))]
    )
    only_known = fold([Placed(1, 900.0, AdapterResumed("lora", 0, "known"))])
    assert [shut.was_shut_after(moment) for moment in (0.0, 1e9)] == [True, True]
    assert [opened.was_shut_after(moment) for moment in (0.0, 399.0, 400.0)] == [True, True, False]
    assert not only_known.was_shut_after(0.0)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.key)
def test_events_are_read_as_they_were_written(event: FleetEvent) -> None:
    name = type(event).__name__
    assert TYPES[name] is type(event)
    assert decode(name, event.VERSION, encode(event), TYPES) == event
