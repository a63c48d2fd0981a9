"""How an event is stored: its name, the version of its fields, and the fields as JSON, a hash sign and a checksum.

The checksum is there because JSON with a flipped bit is usually still JSON.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import msgspec

from app.domain import events, fleet
from app.domain.events import Event, UnknownEvent
from workers.codec import describe

TYPES: Mapping[str, type[Event]] = {**events.TYPES, **fleet.TYPES}

describe(*TYPES.values())

CHECK_BYTES = 8
"""CRC-32 as hex."""


def encode(event: Event) -> bytes:
    """The stored data of an event, without its name and version."""
    fields = msgspec.json.encode(event)
    return b"%b#%08x" % (fields, zlib.crc32(fields))


def decode(name: str, version: int, data: bytes, types: Mapping[str, type[Event]] = TYPES) -> Event:
    """A stored row as an event; an older version is brought up to date (`Event.upcast`).

    Raises UnknownEvent for a name or version that this code does not know, since guessing could lose its meaning, and
    for data that is damaged or does not fit its version.
    """
    kind = types.get(name)
    if kind is None:
        raise UnknownEvent(f"event {name!r} is not known to this version")
    if not 1 <= version <= kind.VERSION:
        raise UnknownEvent(f"event {name!r} has version {version}; this version reads up to {kind.VERSION}")
    raw = memoryview(data)[: -1 - CHECK_BYTES]
    if b"#%08x" % zlib.crc32(raw) != data[-1 - CHECK_BYTES :]:
        raise UnknownEvent(f"event {name!r} version {version} is not what was stored")
    try:
        if version == kind.VERSION:
            return msgspec.json.decode(raw, type=kind)
        fields = msgspec.json.decode(raw)
        for before in range(version, kind.VERSION):
            fields = kind.upcast(before, fields)
        return msgspec.convert(fields, kind)
    except msgspec.MsgspecError as error:
        raise UnknownEvent(f"event {name!r} version {version} cannot be read: {error}") from error
