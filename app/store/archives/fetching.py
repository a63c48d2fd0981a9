"""Reads many sessions of which some are archived, or are archived or brought back meanwhile."""

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
from app.store.damaged import split
from app.store.ports import Database
from app.store.reads import END, SPAN, Position
from workers.codec import CorruptContent

T = TypeVar("T")


async def fetch_archived(
    database: Database, found: Mapping[str, StoredSession], upto: Position, *, replay: bool, images: bool = False
) -> dict[str, StoredSession]:
    """The sessions with all of what is archived of them. `upto` is for those that turn out to be in the database.

    Raises PayloadsUnavailable, StoreUnavailable.
    """
    whole = dict(found)
    while archived := {one: stored.place for one, stored in whole.items() if _is_to_fetch(stored)}:
        for place in sorted({place for place in archived.values() if place}):
            ids = [one for one, at in archived.items() if at == place]
            parts = {one: msgspec.structs.replace(whole[one], place=None) for one in ids}
            read = partial(bulk.read_content, found=parts, upto=END, replay=replay, images=images)
            try:
                await opened_archives(database).read(place, read)
            except CorruptContent as error:
                parts = await _read_again(database, ids, place, str(error), upto, replay=replay, images=images)
            whole |= parts
    return whole


def _is_to_fetch(stored: StoredSession) -> bool:
    return stored.place is not None and stored.damage is None


async def _read_again(
    database: Database,
    session_ids: Sequence[str],
    place: Place,
    why: str,
    upto: Position,
    *,
    replay: bool,
    images: bool = False,
) -> dict[str, StoredSession]:
    """Sessions that are not in the archive where they were found: they have moved, or the archive is damaged."""
    read = partial(bulk.read_sessions, session_ids=session_ids, upto=upto, replay=replay, images=images)
    found = await database.read(read, one_moment=True)
    return {
        one: msgspec.structs.replace(stored, damage=why) if stored.place == place else stored
        for one, stored in found.items()
    }


Read = Callable[[Connection, Sequence[str]], Mapping[str, T]]


async def read_each(
    database: Database, session_ids: Sequence[str], function: Read[T], *, in_archive: Read[T] | None = None
) -> dict[str, T]:
    """What `function` gives of these sessions, each read where it is; nothing of those that cannot be read.

    A session that is archived or brought back meanwhile is missed in neither place. `in_archive` is run on archives
    instead. Raises PayloadsUnavailable, StoreUnavailable.
    """
    found: dict[str, T] = {}
    missed: dict[str, Place] = {}
    waiting = [session_ids[at : at + SPAN] for at in range(0, len(session_ids), SPAN)]
    while waiting:
        ids = waiting.pop()
        places, at_home = await database.read(
            partial(_read_home, session_ids=ids, function=function),
            one_moment=True,
            or_else=partial(_read_home, session_ids=ids, function=_around_damage(function)),
        )
        found |= at_home
        for place in sorted(set(places.values())):
            there = [one for one in ids if places.get(one) == place]
            try:
                found |= await opened_archives(database).read(place, _of(in_archive or function, there))
            except CorruptContent as error:
                again = [one for one in there if missed.get(one) != place]  # they may have moved between the two looks
                for one in there:
                    if one not in again:
                        database.unreadable.warn(one, error)
                if again:
                    missed |= dict.fromkeys(again, place)
                    waiting.append(again)
    return found


def _read_home(
    connection: Connection, session_ids: Sequence[str], function: Read[T]
) -> tuple[dict[str, Place], Mapping[str, T]]:
    """The places of those of the sessions that are archived, and what `function` gives of the others."""
    places = places_of(connection, session_ids)
    return places, function(connection, [one for one in session_ids if one not in places])


def _around_damage(function: Read[T]) -> Read[T]:
    return lambda connection, session_ids: split(connection, session_ids, function)[0]


def _of(function: Read[T], session_ids: Sequence[str]) -> Callable[[Connection], Mapping[str, T]]:
    return lambda connection: function(connection, session_ids)


def opened_archives(database: Database) -> OpenArchives:
    """Raises PayloadsUnavailable."""
    if database.archives is None:
        raise PayloadsUnavailable("sessions are archived in object storage: set TURNLOG_PAYLOADS")
    return database.archives
