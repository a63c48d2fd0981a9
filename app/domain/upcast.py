"""Encodes events for the store, and upgrades old ones: one pure step from each (name, version) to the next.

A stored event is JSON, a hash sign and a checksum: JSON with a flipped bit is usually still JSON.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from app.domain import fleet
from app.domain.events import TYPES as OF_SESSIONS
from app.domain.events import VERSIONS as OF_SESSIONS_VERSIONS
from app.domain.events import Event, UnknownEvent
from workers.codec import describe

TYPES: Mapping[str, type[Event]] = {**OF_SESSIONS, **fleet.TYPES}
VERSIONS: Mapping[str, int] = {**OF_SESSIONS_VERSIONS, **fleet.VERSIONS}

describe(*TYPES.values())

Step = Callable[[dict[str, Any]], dict[str, Any]]


def _only_added(fields: dict[str, Any]) -> dict[str, Any]:
    """The next version only adds fields, whose defaults describe older events."""
    return fields


def _provisional(fields: dict[str, Any]) -> dict[str, Any]:
    """Until version 3 the number of a turn that did not commit was given to the next one."""
    return {**fields, "is_provisional": True}


STEPS: Mapping[tuple[str, int], Step] = {
    ("SessionCreated", 1): _only_added,
    ("SessionCreated", 2): _only_added,
    ("SessionCreated", 3): _only_added,
    ("SessionCreated", 4): _only_added,
    ("SessionCreated", 5): _only_added,
    ("FleetPaused", 1): _only_added,
    ("FleetResumed", 1): _only_added,
    ("TurnOpened", 1): _only_added,
    ("TurnOpened", 2): _only_added,
    ("TurnOpened", 3): _provisional,
    ("TurnCommitted", 1): _only_added,
    ("TurnCommitted", 2): _only_added,
    ("TurnCommitted", 3): _only_added,
    ("TurnCommitted", 4): _only_added,
    ("TurnCommitted", 5): _only_added,
    ("TurnCommitted", 6): _only_added,
    ("TurnCommitted", 7): _only_added,
    ("TurnRejected", 1): _only_added,
    ("TurnAbandoned", 1): _only_added,
    ("BlobsTombstoned", 1): _only_added,
    ("RewardAssigned", 1): _only_added,
    ("SessionClosed", 1): _only_added,
    ("SessionClosed", 2): _only_added,
}


def upcast(
    name: str,
    version: int,
    fields: dict[str, Any],
    *,
    steps: Mapping[tuple[str, int], Step] = STEPS,
    versions: Mapping[str, int] = VERSIONS,
) -> dict[str, Any]:
    """The fields in the current version's structure.

    Raises UnknownEvent for a name or version that this release does not know: a newer release wrote it, and guessing
    could lose its meaning.
    """
    current = versions.get(name)
    if current is None:
        raise UnknownEvent(f"event {name!r} is not known to this version")
    if version > current or version < 1:
        raise UnknownEvent(f"event {name!r} has version {version}; this version reads up to {current}")
    for number in range(version, current):
        fields = steps[name, number](fields)
    return fields


def decode(name: str, version: int, data: bytes) -> Event:
    """A stored row as an event. Raises UnknownEvent, also where the data is damaged or does not fit its own version."""
    fields = _undamaged(name, version, data)
    try:
        if version == VERSIONS.get(name):
            return msgspec.json.decode(fields, type=TYPES[name])
        return msgspec.convert(upcast(name, version, msgspec.json.decode(fields)), TYPES[name])
    except msgspec.MsgspecError as error:
        raise UnknownEvent(f"event {name!r} version {version} cannot be read: {error}") from error


def encode(event: Event) -> bytes:
    """The stored data of an event, without its name and version."""
    fields = msgspec.json.encode(event)
    return b"%b#%08x" % (fields, zlib.crc32(fields))


CHECK_BYTES = 8
"""CRC-32 as hex."""


def _undamaged(name: str, version: int, data: bytes) -> bytes | memoryview:
    """The JSON, checked; older rows have no checksum. Raises UnknownEvent."""
    if data.endswith(b"}"):
        return data
    fields = memoryview(data)[: -1 - CHECK_BYTES]
    if b"#%08x" % zlib.crc32(fields) != data[-1 - CHECK_BYTES :]:
        raise UnknownEvent(f"event {name!r} version {version} is not what was stored")
    return fields
