"""Positions in the log of all sessions, as clients get and return them."""

from __future__ import annotations

import msgspec

from app.domain import cursors
from app.store.reads import Position


class LogPosition(msgspec.Struct, frozen=True, array_like=True):
    """The place of an event in the order of commits, in the log with this epoch.

    `at` is when the event was written, in seconds since the epoch: after a crash of the database another event may
    have its place. None: not known.
    """

    epoch: str
    place: Position
    at: float | None = None

    def encode(self) -> str:
        return cursors.encode(self)


def decode_position(text: str, giver: str, name: str = "cursor") -> LogPosition:
    """The position in parameter `name`. Raises InvalidRequest if it is not one that `giver` gave."""
    found: LogPosition = cursors.decode(text, LogPosition, giver, name)
    return found
