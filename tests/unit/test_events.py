"""Stored names and versions, and upcasting step by step."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from app.domain import events
from app.domain.events import (
    TYPES,
    VERSIONS,
    Event,
    ForkRef,
    RewardAssigned,
    RolledBack,
    SessionClosed,
    SessionConfig,
    SessionCreated,
    TurnAbandoned,
    UnknownEvent,
    name_of,
    to_fields,
)
from app.domain.upcast import CHECK_BYTES, STEPS, decode, encode, upcast
from app.domain.upcast import VERSIONS as STORED_VERSIONS


def test_stored_names_are_stable() -> None:
    """Rows in every database carry these; a rename needs an upcasting step, not an edit here."""
    assert set(TYPES) >= {
        "SessionCreated",
        "TurnOpened",
        "TurnCommitted",
        "TurnRejected",
        "TurnAbandoned",
        "RolledBack",
        "RewardAssigned",
        "SessionNoted",
        "SessionClosed",
        "SessionErased",
    }
    assert set(VERSIONS) == set(TYPES)
    assert all(name_of_type in vars(events) for name_of_type in TYPES)
    assert set(events.EXPORTED) <= set(TYPES)


def test_every_older_version_has_its_step() -> None:
    assert set(STEPS) == {(name, number) for name, current in STORED_VERSIONS.items() for number in range(1, current)}


@pytest.mark.parametrize("event", [SessionClosed(), RolledBack(1, (2, 3)), RewardAssigned(0.1, {"a": 1.0}, 2)])
def test_an_event_survives_its_row(event: Event) -> None:
    assert decode(name_of(event), VERSIONS[name_of(event)], encode(event)) == event
    assert msgspec.convert(to_fields(event), type(event)) == event


def test_a_reward_of_before_erasures_took_its_components_is_read_as_it_was() -> None:
    row = b'{"reward":0.5,"components":{"style":0.25},"turn":2}'
    assert decode("RewardAssigned", 1, row) == RewardAssigned(0.5, {"style": 0.25}, 2, components_erased=False)


def test_events_are_frozen() -> None:
    with pytest.raises(AttributeError):
        SessionClosed().reason = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "version", "data"),
    [
        ("TurnForked", 1, b"{}"),
        ("SessionClosed", 4, b"{}"),
        ("SessionClosed", 0, b"{}"),
        ("SessionClosed", -1, b"{}"),
        ("", 1, b"{}"),
        ("SessionClosed", 1, b'{"reason": "boredom"}'),
        ("SessionClosed", 1, b'{"mood": "new field"}'),
        ("SessionClosed", 1, b"[]"),
        ("SessionClosed", 1, b"{"),
        ("SessionClosed", 1, b""),
        ("RolledBack", 1, b"{}"),
        ("RolledBack", 1, b'{"to_turn": "1", "discarded": []}'),
        ("TurnAbandoned", 1, b'{"turn": 1, "fence": 2, "reason": "tired"}'),
    ],
)
def test_what_this_version_cannot_read_is_refused(name: str, version: int, data: bytes) -> None:
    with pytest.raises(UnknownEvent):
        decode(name, version, data)


def test_upcasting_goes_step_by_step() -> None:
    trace: list[str] = []

    def step(number: int) -> Any:
        def change(fields: dict[str, Any]) -> dict[str, Any]:
            trace.append(f"{number}->{number + 1}")
            return {**fields, f"v{number + 1}": True}

        return change

    steps = {("Made", 1): step(1), ("Made", 2): step(2), ("Made", 3): step(3), ("Other", 1): step(9)}
    versions = {"Made": 4, "Other": 2}
    assert upcast("Made", 1, {"a": 1}, steps=steps, versions=versions) == {"a": 1, "v2": True, "v3": True, "v4": True}
    assert trace == ["1->2", "2->3", "3->4"]
    assert upcast("Made", 3, {"a": 1}, steps=steps, versions=versions) == {"a": 1, "v4": True}
    assert upcast("Made", 4, {"a": 1}, steps=steps, versions=versions) == {"a": 1}
    for version in (0, 5):
        with pytest.raises(UnknownEvent, match=str(version)):
            upcast("Made", version, {}, steps=steps, versions=versions)
    with pytest.raises(UnknownEvent, match="Unheard"):
        upcast("Unheard", 1, {}, steps=steps, versions=versions)


def test_a_creation_of_before_there_were_forks_is_none_and_an_older_process_refuses_one() -> None:
    stored = b'{"config":{"rollback_window":1,"parent":"p"},"body_hash":"00"}'
    before = decode("SessionCreated", 3, stored)
    assert before == SessionCreated(SessionConfig(1, parent="p"), "00")
    forked = SessionCreated(SessionConfig(1), "00", fork=ForkRef("source", 3, 2, loss=False))
    data = encode(forked)
    assert b'"fork":{"session":"source","turn":3,"turns":2,"loss":false}' in data
    assert decode("SessionCreated", 4, data) == forked
    with pytest.raises(UnknownEvent, match="reads up to 3"):
        upcast("SessionCreated", 4, {}, versions={"SessionCreated": 3})


def test_upcasting_leaves_the_stored_fields_alone() -> None:
    stored = {"turn": 1, "fence": 2, "reason": "disconnect"}
    assert upcast("TurnAbandoned", 1, stored) == stored
    assert msgspec.convert(stored, TurnAbandoned) == TurnAbandoned(1, 2, "disconnect")


def test_an_event_with_a_flipped_bit_is_refused() -> None:
    """A number with a flipped bit is a number, too: only the checksum tells."""
    data = encode(RewardAssigned(0.5, {"tests": 12.0}))
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UnknownEvent):
            decode("RewardAssigned", 1, bytes(damaged))


def test_an_event_that_lost_its_end_is_refused_or_has_lost_its_checksum_alone() -> None:
    event = RewardAssigned(0.5, {"tests": 12.0})
    data = encode(event)
    whole = len(data) - 1 - CHECK_BYTES
    for length in range(len(data)):
        if length == whole:
            assert decode("RewardAssigned", 1, data[:length]) == event, "as rows were before there were checksums"
            continue
        with pytest.raises(UnknownEvent):
            decode("RewardAssigned", 1, data[:length])
