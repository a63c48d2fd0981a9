"""Sessions that go into archives while others read, erase or give the archive up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from helpers.databases import read_engine
from helpers.store import Meanwhile, Store
from sqlalchemy import event
from sqlalchemy.util import await_only

from app.domain.events import EXPORTED, RewardAssigned, SessionErased
from app.export.pages import ExportPages
from app.export.rollout_rows import RolloutRows
from app.sessions.all_events import AllEvents, EventQuery
from app.sessions.archives import Archives
from app.sessions.cache import SessionCache
from app.sessions.erasure import Erasure
from app.sessions.followers import Followers
from app.sessions.lifecycle import Sessions
from app.sessions.log_end import LogEnd
from app.store import bulk
from app.store.archives import rows
from app.store.archives.fetching import read_each
from app.store.archives.format import Place, object_of
from app.store.archives.opened import OpenArchives
from app.store.archives.parquet import encode
from app.store.archives.rows import AddArchive, Archive, BringBack, EndArchive, places_in
from app.store.dialect import Tx
from app.store.log_sessions import AssignReward, Erase
from app.store.packs.bucket import Bucket
from app.store.reads import END, START, Position
from ops.verify import verify

pytestmark = pytest.mark.anyio

WAITS_S = 0.3
"""Long enough for an operation that does not wait for another's transaction to have ended."""


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


@contextmanager
def before_first(store: Store, text: str, change: Callable[[], Awaitable[object]], value: str = "") -> Iterator[None]:
    """Run `change` to its end before this process's first statement that has this text, with this value."""
    is_due = True

    def run(_: object, __: object, statement: str, values: object, *___: object) -> None:
        nonlocal is_due
        if is_due and text in " ".join(statement.split()) and value in str(values):
            is_due = False
            await_only(change())

    event.listen(read_engine(store.database), "before_cursor_execute", run)
    yield
    assert not is_due
    event.remove(read_engine(store.database), "before_cursor_execute", run)


async def three_closed(store: Store) -> Archive:
    """Sessions `first`, `s` and `last`; what archives `s`."""
    for session_id in ("first", "s", "last"):
        await store.create(session_id)
        await store.close(session_id)
    return await archiving(store, "s")


async def test_a_reader_of_all_events_misses_none_of_a_session_that_is_just_archived(pair: tuple[Store, Store]) -> None:
    one, other = pair
    archive = await three_closed(one)
    feed = AllEvents(one.database, LogEnd(one.database, 0.01))
    with before_first(
        one, "SELECT events.tx, events.position, events.session_id, events.seq", lambda: other.submit(archive)
    ):
        pieces = await feed.start(EventQuery())
    lines = [json.loads(line) async for piece in pieces for line in piece.splitlines()]
    assert sorted(line["session_id"] for line in lines) == sorted(["first", "s", "last"] * 2)


async def exported(store: Store, high: Position) -> list[str]:
    """The sessions of an export up to `high`, as its pages give them."""
    pages = ExportPages(
        store.database, high, grouped=False, advantages=False, replay=False, url_s=60, images=False, branches="kept"
    )
    parts, _ = await pages.following(START, None, None, EXPORTED)
    return [place.session_id for part in parts for place in part]


async def test_an_export_misses_no_session_that_is_just_brought_back(pair: tuple[Store, Store]) -> None:
    one, other = pair
    archive = await three_closed(one)
    [whole] = await one.database.read(lambda connection: rows.read_whole(connection, ["s"]))
    assert await one.submit(archive)
    back = BringBack("s", Place("of-s", 0), whole)
    high = await one.horizon()
    with before_first(one, "FROM archived_sessions", lambda: other.submit(back)):
        assert await exported(one, high) == ["first", "s", "last"]
    assert await exported(one, high) == ["first", "s", "last"]


async def test_an_export_gives_a_session_that_is_just_archived_once(pair: tuple[Store, Store]) -> None:
    one, other = pair
    archive = await three_closed(one)
    high = await one.horizon()
    with before_first(one, "FROM archived_sessions", lambda: other.submit(archive)):
        assert await exported(one, high) == ["first", "s", "last"]


async def in_bucket(store: Store, folder: Path, session_id: str) -> tuple[Archive, BringBack]:
    """What archives a closed session, whose archive is there already, and what brings it back."""
    bucket = Bucket(f"file://{folder}/packs", 5.0)
    store.database.bucket, store.database.archives = bucket, OpenArchives(bucket)
    archive = await archiving(store, session_id)
    [whole] = await store.database.read(lambda connection: rows.read_whole(connection, [session_id]))
    await bucket.put(object_of(f"of-{session_id}"), encode([[whole]]))
    return archive, BringBack(session_id, Place(f"of-{session_id}", 0), whole)


@pytest.mark.parametrize("text", ["FROM archived_sessions", "FROM events"])
async def test_rows_of_a_session_that_is_just_brought_back_are_counted(
    pair: tuple[Store, Store], tmp_path: Path, text: str
) -> None:
    """Before the look at where it is, and between that and the look at its log."""
    one, other = pair
    for session_id in ("root", "s"):
        await one.create(session_id)
        await one.take_turn(session_id)
        await one.close(session_id)
    archive, back = await in_bucket(one, tmp_path, "s")
    stored = await one.database.read(partial(bulk.read_sessions, session_ids=["root"], upto=END, replay=False))
    assert await one.submit(archive)
    counts = RolloutRows(one.database, await one.horizon(), "kept")
    with before_first(one, text, lambda: other.submit(back)):
        found = await counts.counted(stored, {"root": "root", "s": "root"})
    assert found["root"].rollout_rows == 2


async def test_an_archive_that_is_gone_costs_only_its_sessions(store: Store, tmp_path: Path) -> None:
    for session_id in ("s", "other"):
        await store.create(session_id)
        await store.close(session_id)
    archive, _ = await in_bucket(store, tmp_path, "s")
    assert await store.submit(archive)
    (tmp_path / "packs" / object_of("of-s")).unlink()
    found = await read_each(store.database, ["s", "other"], partial(bulk.read_logs, upto=END))
    assert list(found) == ["other"]


async def test_verify_finds_nothing_wrong_with_a_session_that_is_just_archived(pair: tuple[Store, Store]) -> None:
    one, other = pair
    archive = await three_closed(one)
    log = "FROM events WHERE events.session_id ="
    with before_first(one, log, lambda: other.submit(archive), "'s'"):
        report = await verify(one.database)
    assert report.problems == []


async def test_an_erasure_leaves_no_components_of_a_session_that_is_just_archived(store: Store, tmp_path: Path) -> None:
    """The archive was written before its rewards' components were removed."""
    await store.create("s")
    await store.submit(AssignReward("s", 4.0, RewardAssigned(1.0, {"secret": 1.0})))
    await store.close("s")
    archive, _ = await in_bucket(store, tmp_path, "s")
    writer = Meanwhile(store.writer, Erase, archive).as_writer
    cache = SessionCache(store.database, store.writer, 1 << 20)
    followers, archives = Followers(), Archives(store.database, writer)
    erasure = Erasure(
        database=store.database,
        writer=writer,
        cache=cache,
        followers=followers,
        clock=time.time,
        archives=archives,
        sessions=Sessions(store.database, writer, cache, followers, time.time, archives),
    )
    await erasure.drop_content("s")
    log = await store.log("s")
    assert isinstance(log[-1].event, SessionErased)
    [reward] = [one.event for one in log if isinstance(one.event, RewardAssigned)]
    assert reward.components == {}
