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
    TurnsHeld,
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
    every = [*PLACED, Placed(11, 111.0, AdapterPaused("lora", 1, 990.0, run="a")), Placed(12, 112.0, FleetResumed(1))]
    newest = {placed.event.key: placed for placed in every}
    assert fold(sorted(newest.values(), key=lambda placed: placed.seq)) == fold(every)


def test_gates_hold_back_their_own_adapter_or_everybody() -> None:
    states = [fold(PLACED[:count]) for count in range(len(PLACED) + 1)]
    shut = [[state.is_shut("a", adapter) for adapter in (None, "lora", "other", "unknown")] for state in states]
    nobody, all_of_them = [False] * 4, [True] * 4
    lora, other = [False, True, False, False], [False, False, True, False]
    both = [False, True, True, False]
    assert shut == [nobody, nobody, lora, *[all_of_them] * 5, other, other, both]


def test_closings_only_grow_and_tell_of_an_opening_between() -> None:
    closings = [fold(PLACED[:count]).closings("a", "lora") for count in range(len(PLACED) + 1)]
    assert closings == sorted(closings)
    assert (closings[0], closings[2], closings[4], closings[-1]) == (
        (0, 0, 0, 0),
        (0, 1, 0, 0),
        (1, 1, 0, 0),
        (1, 2, 0, 0),
    )
    assert fold(PLACED).closings("a", None) == (1, 0, 0, 0)


def test_a_gate_says_when_it_changed_and_which_weights_it_guards() -> None:
    """The fleet's are those that the last resume named."""
    fleet = fold(PLACED)
    assert (fleet.gates.adapters["lora"].since, fleet.gates.adapters["lora"].version) == (110.0, "7")
    assert (fleet.gates.fleet.since, fleet.gates.fleet.until, fleet.gates.fleet.mode) == (108.0, None, None)
    assert fold(PLACED[:5]).gates.fleet.mode == "retract"
    events = [FleetResumed(0, version="41"), FleetPaused(1, 9.0, version="41"), FleetResumed(1)]
    states = [fold(Placed(seq, 1.0, event) for seq, event in enumerate(events[:count], 1)) for count in range(4)]
    assert [state.gates.fleet.version for state in states] == [None, "41", "41", None]


def test_it_is_known_whether_turns_were_held_back_lately() -> None:
    shut = fold(PLACED)
    opened = fold(
        [*PLACED, Placed(11, 300.0, AdapterResumed("lora", 2)), Placed(12, 400.0, AdapterResumed("other", 1))]
    )
    only_known = fold([Placed(1, 900.0, AdapterResumed("lora", 0, "known"))])
    assert [shut.shut_after(moment) for moment in (0.0, 1e9)] == [{None}, {None}]
    assert [opened.shut_after(moment) for moment in (0.0, 399.0, 400.0)] == [{None}, {None}, set()]
    assert only_known.shut_after(0.0) == set()
    held: list[FleetEvent] = [TurnsHeld("cut", "restore", 1, "before", run=run) for run in ("a", None)]
    states = [fold(Placed(seq, 1.0, event) for seq, event in enumerate(held[:count], 1)) for count in range(3)]
    assert [state.shut_after(5.0) for state in states] == [set(), {"a"}, {"a", None}]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.key)
def test_events_are_read_as_they_were_written(event: FleetEvent) -> None:
    name = type(event).__name__
    assert TYPES[name] is type(event)
    assert decode(name, event.VERSION, encode(event), TYPES) == event


def test_a_runs_gates_hold_its_own_turns_alone() -> None:
    events: list[FleetEvent] = [
        FleetPaused(1, 800.0, "retract", run="a"),
        AdapterPaused("lora", 1, 700.0, run="b"),
        FleetResumed(1, version="7", run="a"),
        EngineListed("http://a", run="a"),
        EngineListed("http://a", "removed", run="a"),
    ]
    placed = [Placed(seq, 1.0, event) for seq, event in enumerate(events, 1)]
    states = [fold(placed[:count]) for count in range(4)]
    turns = [(run, adapter) for run in ("a", "b", "default") for adapter in (None, "lora")]
    shut = [[turn for turn in turns if state.is_shut(*turn)] for state in states]
    a, b = [("a", None), ("a", "lora")], [("b", "lora")]
    assert shut == [[], a, [*a, *b], b]
    assert [state.closings("a", "lora") for state in states] == [(0, 0, 0, 0), *[(0, 0, 1, 0)] * 3]
    assert [state.at_engine("a") for state in states] == [(0, False), (1, True), (1, True), (1, False)]
    assert [state.at_engine(None) for state in states] == [(0, False), (1, True), (1, True), (1, False)]
    assert [state.at_engine("b") for state in states] == [(0, False)] * 4
    assert (states[3].version_of("a"), states[3].version_of("b")) == ("7", None)
    assert states[2].knows_adapter("b", "lora")
    assert not states[2].knows_adapter("a", "lora")
    assert [state.shut_after(5.0) for state in states] == [set(), {"a"}, {"a", "b"}, {"b"}]
    assert states[3].shut_after(0.5) == {"a", "b"}
    assert fold(placed).owners == {"a"}
    assert fold([placed[0], placed[2], placed[4]]) == fold([*placed[:1], *placed[2:]])
