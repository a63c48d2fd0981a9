"""Stored names and versions of events, and the recipe for a new version."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import msgspec
import pytest

from app.domain import events, fleet
from app.domain.events import (
    CHECK_BYTES,
    Event,
    RewardAssigned,
    RolledBack,
    SessionClosed,
    UnknownEvent,
    decode,
    encode,
    name_of,
    to_fields,
)

CONTRIBUTING = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


def stored(fields: bytes) -> bytes:
    return b"%b#%08x" % (fields, zlib.crc32(fields))


def test_every_event_has_a_name_of_its_own_and_is_of_the_first_version() -> None:
    """Rows in every database carry these."""
    types = {**events.TYPES, **fleet.TYPES}
    assert {name: kind.VERSION for name, kind in types.items()} == dict.fromkeys(types, 1)
    assert {kind.__name__ for kind in types.values()} == set(types)
    assert set(events.EXPORTED) <= set(types)


@pytest.mark.parametrize("event", [SessionClosed(), RolledBack(1, (2, 3)), RewardAssigned(0.1, {"a": 1.0}, 2)])
def test_an_event_survives_its_row(event: Event) -> None:
    assert decode(name_of(event), event.VERSION, encode(event)) == event
    assert msgspec.convert(to_fields(event), type(event)) == event


@pytest.mark.parametrize(
    ("name", "version", "fields"),
    [
        ("TurnForked", 1, b"{}"),
        ("SessionClosed", 2, b"{}"),
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
def test_what_this_version_cannot_read_is_refused(name: str, version: int, fields: bytes) -> None:
    with pytest.raises(UnknownEvent):
        decode(name, version, stored(fields))


def test_the_recipe_for_a_new_version_of_an_event_works() -> None:
    """CONTRIBUTING has an event with two versions: rows of both are read, and one of a third is refused."""
    [recipe] = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)
    names: dict[str, type[Event]] = {}
    exec(compile(recipe, "CONTRIBUTING.md", "exec", dont_inherit=True), names)
    kind = names["TurnFlagged"]
    new = msgspec.convert({"turn": 3, "reasons": ["too long"]}, kind)
    types = {"TurnFlagged": kind}
    assert decode("TurnFlagged", 2, encode(new), types) == new
    assert decode("TurnFlagged", 1, stored(b'{"turn":3,"reason":"too long"}'), types) == new
    for version, fields in ((1, b'{"turn":"3","reason":"too long"}'), (3, b'{"turn":3,"reasons":["too long"]}')):
        with pytest.raises(UnknownEvent, match=f"version {version}"):
            decode("TurnFlagged", version, stored(fields), types)


def test_an_event_with_a_flipped_bit_is_refused() -> None:
    """A number with a flipped bit is a number, too: only the checksum tells."""
    data = encode(RewardAssigned(0.5, {"tests": 12.0}))
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UnknownEvent):
            decode("RewardAssigned", 1, bytes(damaged))


def test_an_event_that_lost_its_end_is_refused() -> None:
    data = encode(RewardAssigned(0.5, {"tests": 12.0}))
    assert data == stored(data[: -1 - CHECK_BYTES])
    for length in range(len(data)):
        with pytest.raises(UnknownEvent):
            decode("RewardAssigned", 1, data[:length])
