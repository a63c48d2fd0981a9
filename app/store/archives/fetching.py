"""Reads many sessions of which some are archived."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec
from sqlalchemy import Connection

from app.errors import PayloadsUnavailable
from app.store import bulk
from app.store.archives.format import Place
from app.store.archives.opened import OpenArchives
from app.store.archives.places import places_of
from app.store.bulk import StoredSession
from app.store.ports import Database
from app.store.reads import END, SPAN, Position
from workers.codec import CorruptContent

T = TypeVar("T")


async def fetch_archived(
    database: Database, found: Mapping[str, StoredSession], upto: Position, *, replay: bool
) -> dict[str, StoredSession]:
    """The sessions with all of what is archived of them. `upto` is for those that turn out to be in the database.

    Raises PayloadsUnavailable, StoreUnavailable.
    """
    whole = dict(found)
    while archived := {one: stored.place for one, stored in whole.items() if _is_to_fetch(stored)}:
        for place in sorted({place for place in archived.values() if place}):
            ids = [one for one, at in archived.items() if at == place]
            parts = {one: msgspec.structs.replace(whole[one], place=None) for one in ids}
            read = partial(bulk.read_content, found=parts, upto=END, replay=replay)
            try:
                await opened_archives(database).read(place, read)
            except CorruptContent as error:
                parts = await _read_again(database, ids, place, str(error), upto, replay=replay)
            whole |= parts
    return whole


def _is_to_fetch(stored: StoredSession) -> bool:
    return stored.place is not None and stored.damage is None


async def _read_again(
    database: Database, session_ids: Sequence[str], place: Place, why: str, upto: Position, *, replay: bool
) -> dict[str, StoredSession]:
    """Sessions that are not in the archive where they were found: they have moved, or the archive is damaged."""
    read = partial(bulk.read_sessions, session_ids=session_ids, upto=upto, replay=replay)
    found = await database.read(read, one_moment=True)
    return {
        one: msgspec.structs.replace(stored, damage=why) if stored.place == place else stored
        for one, stored in found.items()
    }


async def read_archived(
    database: Database, session_ids: Sequence[str], function: Callable[[Connection, Sequence[str]], Mapping[str, T]]
) -> dict[str, T]:
    """What `function` gives of those of the sessions that are archived; nothing of those that cannot be read.

    Raises PayloadsUnavailable, StoreUnavailable.
    """
    found: dict[str, T] = {}
    for at in range(0, len(session_ids), SPAN):
        places = await database.read(partial(places_of, session_ids=session_ids[at : at + SPAN]))
        for place in sorted(set(places.values())):
            ids = [one for one, where in places.items() if where == place]
            try:
                found |= await opened_archives(database).read(place, lambda connection: function(connection, ids))  # noqa: B023
            except CorruptContent as error:
                for one in ids:
                    database.unreadable.warn(one, error)
    return found


def opened_archives(database: Database) -> OpenArchives:
    """Raises PayloadsUnavailable."""
    if database.archives is None:
        raise PayloadsUnavailable("sessions are archived in object storage: set TURNLOG_PAYLOADS")
    return database.archives
