"""Sessions that go into archives while others read, erase or give the archive up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from helpers.store import Store, two_stores
from sqlalchemy import Connection
from sqlalchemy.util import await_only

from app.sessions.all_events import AllEvents, EventQuery
from app.sessions.log_end import LogEnd
from app.store import all_events
from app.store.all_events import EventFilter
from app.store.archives import rows
from app.store.archives.rows import AddArchive, Archive, EndArchive, places_in
from app.store.dialect import Tx
from app.store.reads import Position

pytestmark = pytest.mark.anyio

WAITS_S = 0.3
"""Long enough for an operation that does not wait for another's transaction to have ended."""


@pytest.fixture
async def pair(postgres_url: str) -> AsyncIterator[tuple[Store, Store]]:
    async with two_stores(postgres_url) as made:
        yield made


async def archiving(store: Store, session_id: str) -> Archive:
    """What puts a closed session into a new archive."""
    archive_id = await store.submit(AddArchive(f"of-{session_id}", None))
    [whole] = await store.database.read(lambda connection: rows.read_whole(connection, [session_id]))
    return Archive(session_id, whole.head["version"], archive_id, 0, *places_in(whole.rows))


async def test_an_archive_that_a_session_is_just_going_into_is_not_given_up(pair: tuple[Store, Store]) -> None:
    """As when a server is stopped: the step has ended, and what it submitted has not."""
    one, other = pair
    await one.create("s")
    await one.close("s")
    archive = await archiving(one, "s")
    written = asyncio.Event()

    def slow(tx: Tx) -> bool:
        done = archive.apply(tx)
        written.set()
        await_only(asyncio.sleep(WAITS_S))
        return done

    first = asyncio.ensure_future(one.database.write(slow, durable=True))
    await written.wait()
    is_used = await other.submit(EndArchive(archive.archive_id))
    assert await first
    assert is_used
    assert [listed.sessions for listed in await one.database.read(rows.listed)] == [1]


async def test_a_reader_of_all_events_misses_none_of_a_session_that_is_just_archived(
    pair: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is archived between the reader's look at the archives and its look at the log."""
    one, other = pair
    for session_id in ("first", "s", "last"):
        await one.create(session_id)
        await one.close(session_id)
    archive = await archiving(one, "s")
    real, is_archived = all_events.next_archived, False

    def then_archive(
        connection: Connection, after: Position, upto: Position, wanted: EventFilter
    ) -> tuple[Position, str] | None:
        nonlocal is_archived
        found = real(connection, after, upto, wanted)
        if not is_archived:
            is_archived = await_only(other.submit(archive))
        return found

    monkeypatch.setattr(all_events, "next_archived", then_archive)
    feed = AllEvents(one.database, LogEnd(one.database, 0.01))
    pieces = await feed.start(EventQuery())
    lines = [json.loads(line) async for piece in pieces for line in piece.splitlines()]
    assert is_archived
    assert sorted(line["session_id"] for line in lines) == sorted(["first", "s", "last"] * 2)
