"""Object storage that still has objects of the store, though the server is started without it: nothing deletes them."""

from __future__ import annotations

from sqlalchemy import Connection

from app.store.packs.rows import places_in_use

ADVICE = "start with TURNLOG_PAYLOADS_FROM set to it until it is empty"


def left_behind(connection: Connection, used: str | None) -> list[str]:
    """What is wrong with each place that has objects of the store, but for the place that is used (None: none is)."""
    return [
        f"{place} still had replay payloads of this store, and nothing deletes them"
        for place in places_in_use(connection)
        if place != used
    ]
