"""Old events as today's: one pure step from each (name, version) to the next version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from app.domain.events import TYPES, VERSIONS, Event, UnknownEvent

Step = Callable[[dict[str, Any]], dict[str, Any]]


def _only_added(fields: dict[str, Any]) -> dict[str, Any]:
    """The next version has more fields, whose defaults say what was so before."""
    return fields


STEPS: Mapping[tuple[str, int], Step] = {
    ("SessionCreated", 1): _only_added,
    ("TurnOpened", 1): _only_added,
    ("TurnCommitted", 1): _only_added,
    ("TurnCommitted", 2): _only_added,
    ("TurnRejected", 1): _only_added,
    ("SessionClosed", 1): _only_added,
}


def upcast(
    name: str,
    version: int,
    fields: dict[str, Any],
    *,
    steps: Mapping[tuple[str, int], Step] = STEPS,
    versions: Mapping[str, int] = VERSIONS,
) -> dict[str, Any]:
    """The fields in the shape of the current version.

    Raises UnknownEvent for a name or a version that this release does not know: a newer release wrote
    it, and guessing could lose what it meant.
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
    """A stored row as an event. Raises UnknownEvent, also where the data does not fit its own version."""
    try:
        if version == VERSIONS.get(name):
            return msgspec.json.decode(data, type=TYPES[name])
        return msgspec.convert(upcast(name, version, msgspec.json.decode(data)), TYPES[name])
    except msgspec.MsgspecError as error:
        raise UnknownEvent(f"event {name!r} version {version} cannot be read: {error}") from error


def encode(event: Event) -> bytes:
    return msgspec.json.encode(event)
