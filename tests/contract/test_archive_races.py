"""What else happens to a session while it leaves for a file, and while it comes back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from helpers.databases import connected
from helpers.log import BODY
from helpers.store import Store, reward
from sqlalchemy import Connection, event, func, select, text, update

from app.domain.events import RewardAssigned, SessionConfig, SessionCreated
from app.domain.selection import Selection
from app.errors import ArchiveBusy, PayloadsUnavailable
from app.export.pages import ExportPage, ExportPages
from app.export.parts import PartRows
from app.export.query import Cursor, ExportQuery
from app.features.archive.archive import Archive
from app.features.archive.rows import DROPPED_AT_ONCE, LEASE, Forget, Import, Line, Reserve, unfinished
from app.features.objects.bucket import Bucket
from app.features.objects.rows import note_objects
from app.features.objects.schema import dead_objects
from app.process import FeatureFaults
from app.request_memory import RequestMemory
from app.sessions.cache import SessionCache
from app.sessions.erasure import Erasure
from app.sessions.event_log import Followers
from app.sessions.lifecycle import Sessions
from app.sessions.names import Names
from app.store.content import StoredSession
from app.store.feed import END, START, last_forgotten
from app.store.incarnations import ReleaseLease, TakeLease
from app.store.log_sessions import AssignReward, Create, Existing
from app.store.schema import events, sessions, turns
from app.store.sessions import Generation
from app.store.writer import Writer

pytestmark = pytest.mark.anyio
pytest.importorskip("pyarrow")

Meanwhile = Callable[[], Awaitable[object]]


class Interrupted:
    """A writer before whose first operation of a kind something else happens."""

    def __init__(self, writer: Writer, kind: type, meanwhile: Meanwhile) -> None:
        self._writer = writer
        self._kind = kind
        self._meanwhile: list[Meanwhile] = [meanwhile]

    async def submit(self, operation: Any) -> Any:
        while isinstance(operation, self._kind) and self._meanwhile:
            await self._meanwhile.pop()()
        return await self._writer.submit(operation)


class Stage:
    """A store with an erasure that knows of its archive, and a folder for files."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.cache = SessionCache(store.database, store.writer, 1 << 20)
        self.erasure = Erasure(
            database=store.database,
            writer=store.writer,
            cache=self.cache,
            followers=Followers(),
            clock=time.time,
            sessions=Sessions(store.database, store.writer, self.cache, Followers(), time.time, FeatureFaults()),
        )
        self.erasure.elsewhere.append(self.archive().erase)

    def archive(self, kind: type | None = None, meanwhile: Meanwhile | None = None, *forget: Any) -> Archive:
        writer: Any = self.store.writer
        if kind is not None and meanwhile is not None:
            writer = Interrupted(writer, kind, meanwhile)
        return Archive(
            self.store.database,
            writer,
            self.cache,
            cast(Any, self),
            time.time,
            lambda: self.store.me,
            lease_s=math.inf,
            timeout_s=5.0,
            file_root=str(self.folder),
            forget=forget,
        )

    async def rows(self, session_ids: Any, query: Any) -> list[Any]:
        """For the exporter's."""
        return []

    async def ended(self, session_id: str, number: int = 1) -> None:
        await self.store.create(session_id)
        for _ in range(number):
            await self.store.take_turn(session_id)
        await self.reward(session_id)
        await self.store.close(session_id)

    async def reward(self, session_id: str) -> None:
        await self.store.submit(AssignReward(session_id, 4.0, RewardAssigned(1.0)))

    async def move(self, archive: Archive) -> str | None:
        return (await archive.step(-1e12, self.folder.as_uri(), 100, None, Selection()))["file"]

    async def erased(self, session_id: str) -> None:
        """Ask until all of it is gone, while an archive finishes what is due."""
        while not await self.erasure.erase(session_id):
            await self.move(self.archive())

    def in_files(self, text: str) -> bool:
        return any(text.encode() in file.read_bytes() for file in self.folder.iterdir())


@pytest.fixture
def stage(store: Store, tmp_path: Path) -> Stage:
    folder = tmp_path / "archives"
    folder.mkdir()
    return Stage(store, folder)


async def test_what_was_erased_before_the_index_named_the_file_is_not_in_it(stage: Stage) -> None:
    await stage.ended("session-kept")
    await stage.ended("session-erased")

    async def erase() -> None:
        assert await stage.erasure.erase("session-erased")

    assert await stage.move(stage.archive(Reserve, erase)) is not None
    assert stage.in_files("session-kept")
    assert not stage.in_files("session-erased")


@pytest.mark.parametrize("why", ["erased", "archived"])
async def test_an_export_says_why_a_session_went_between_its_log_and_its_content(stage: Stage, why: str) -> None:
    await stage.ended("gone")
    query = ExportQuery(explain=True)
    pages = ExportPages(stage.store.database, END, query, "kept")
    warned: list[str] = []
    rows = PartRows(query, Cursor("", START, END), "", "kept", lambda session_id, _: warned.append(session_id))
    loop = asyncio.get_running_loop()

    def meanwhile(stored: StoredSession, page: ExportPage) -> Any:
        going = stage.store.erase("gone") if why == "erased" else stage.move(stage.archive())
        asyncio.run_coroutine_threadsafe(going, loop).result()
        return rows.plan(stored, page)

    part = await pages.of(["gone"])
    [row] = rows.fields(part, await pages.read(part, meanwhile))
    assert (row["session_id"], row["excluded"], warned) == ("gone", why, [])


async def test_a_session_that_is_erased_while_it_leaves_leaves_nothing_behind(stage: Stage) -> None:
    await stage.ended("session-erased", DROPPED_AT_ONCE + 4)
    asked: list[bool] = []

    async def erase(session_id: str) -> None:
        asked.append(await stage.erasure.erase(session_id))

    await stage.move(stage.archive(None, None, erase))
    assert asked == [False]
    await stage.erased("session-erased")
    assert not stage.in_files("session-erased")
    left = select(func.count()).select_from(turns)
    assert await stage.store.database.read(lambda connection: connection.execute(left).scalar_one()) == 0
    assert await stage.store.create("session-erased") == Existing("session-erased", "erased", BODY)


async def test_an_erased_session_says_so_in_the_log_that_it_left_with(stage: Stage) -> None:
    """An older file holds a shorter one: whoever has read on knows later events under its numbers."""
    for number in range(8):  # Files have names by chance.
        name = f"session-{number}"
        await stage.ended(name)
        file = await stage.move(stage.archive())
        assert file is not None
        with RequestMemory(1 << 30, 1 << 20).reserve() as memory:
            assert (await stage.archive().bring_back(file, memory))["imported"] == 1
        await stage.reward(name)
        seqs = [recorded.seq for recorded in await stage.store.log(name)]
        assert await stage.move(stage.archive()) is not None
        await stage.erased(name)
        assert [recorded.seq for recorded in await stage.store.log(name)] == [*seqs, seqs[-1] + 1]


async def test_a_damaged_file_keeps_no_copy_of_an_erased_session(stage: Stage) -> None:
    """What the session left with cannot be read; what another file holds of it goes nevertheless."""
    await stage.ended("session-erased")
    first = await stage.move(stage.archive())
    assert first is not None
    with RequestMemory(1 << 30, 1 << 20).reserve() as memory:
        assert (await stage.archive().bring_back(first, memory))["imported"] == 1
    await stage.reward("session-erased")
    await stage.ended("session-kept")  # for which the file must stay
    files = set(stage.folder.iterdir())
    assert await stage.move(stage.archive()) is not None
    [newer] = set(stage.folder.iterdir()) - files
    newer.write_bytes(newer.read_bytes()[:-20])
    assert not await stage.erasure.erase("session-erased")
    await stage.move(stage.archive())
    assert list(stage.folder.iterdir()) == [newer]


async def test_a_session_that_is_erased_while_it_returns_does_not(stage: Stage) -> None:
    await stage.ended("session-erased")
    file = await stage.move(stage.archive())
    assert file is not None
    archive = stage.archive(Import, lambda: stage.erasure.erase("session-erased"))
    with RequestMemory(1 << 30, 1 << 20).reserve() as memory:
        told = await archive.bring_back(file, memory)
    assert told == {
        "imported": 0,
        "there": 0,
        "refused": [{"session_id": "session-erased", "reason": "it was erased"}],
    }
    assert await stage.store.head("session-erased") is None
    await stage.erased("session-erased")


@pytest.mark.parametrize("kind", [None, Reserve])
async def test_a_session_whose_erasure_was_cut_short_does_not_leave_again(stage: Stage, kind: type | None) -> None:
    """It was told to leave every file, and then its process died: a file that got it now would never give it back."""
    await stage.ended("session")
    file = await stage.move(stage.archive())
    assert file is not None
    with RequestMemory(1 << 30, 1 << 20).reserve() as memory:
        assert (await stage.archive().bring_back(file, memory))["imported"] == 1

    async def cut_short() -> None:
        assert await stage.archive().erase("session") is False

    if kind is None:
        await cut_short()
    assert await stage.move(stage.archive(kind, cut_short)) is None
    await stage.erased("session")
    head = await stage.store.head("session")
    assert head is not None
    assert head.status == "erased"
    assert not stage.in_files("session")


async def test_a_file_from_which_nothing_left_is_named_until_it_is_deleted(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.ended("session")

    async def unavailable(bucket: Bucket, name: str) -> None:
        raise PayloadsUnavailable("the storage is away")

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "delete", unavailable)
        with pytest.raises(PayloadsUnavailable):
            await stage.move(stage.archive(Forget, lambda: stage.reward("session")))
    assert stage.in_files("session")
    await stage.erased("session")
    assert not stage.in_files("session")


async def test_a_file_that_is_written_after_another_process_took_over_is_removed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.ended("session")
    real, taken_over = Bucket.put, []

    async def late(bucket: Bucket, name: str, body: bytes) -> None:
        monkeypatch.setattr(Bucket, "put", real)
        await stage.store.submit(ReleaseLease(LEASE, 1))
        taken_over.append(await stage.move(stage.archive()))
        await real(bucket, name, body)

    monkeypatch.setattr(Bucket, "put", late)
    with pytest.raises(ArchiveBusy):
        await stage.move(stage.archive())
    assert taken_over == [file.as_uri() for file in stage.folder.iterdir()]


async def a_rollout(store: Store) -> None:
    """A root and a member, both rewarded and closed."""
    await store.create("root")
    config = SessionConfig(rollback_window=1, parent="root")
    await store.submit(Create("child", 1.0, SessionCreated(config, BODY, None), None))
    for name in ("root", "child"):
        await store.submit(reward(name, 1.0))
        await store.close(name)


async def waiters(store: Store, number: int, other: asyncio.Task[object] | None = None) -> None:
    """Wait until so many transactions wait for a row, or `other` has not waited."""
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    async with asyncio.timeout(60):
        while await store.database.read(lambda c: c.execute(waiting).scalar_one()) < number:
            if other is not None and other.done():
                return
            await asyncio.sleep(0.01)


async def test_an_archived_root_is_erased_with_members_that_stayed(stage: Stage) -> None:
    await stage.store.create("root")
    config = SessionConfig(rollback_window=1, parent="root")
    await stage.store.submit(Create("child", 1.0, SessionCreated(config, BODY, None), None))
    await stage.reward("root")
    await stage.store.close("root")
    undone = update(sessions).where(sessions.c.session_id == "child").values(status="undone")
    await stage.store.database.write(lambda tx: tx.run(undone, {}), durable=True)
    assert await stage.move(stage.archive()) is not None
    await stage.erased("root")
    head = await stage.store.head("child")
    assert head is not None
    assert head.status == "erased"


async def test_an_archived_member_is_erased_by_its_own_id(stage: Stage) -> None:
    await stage.store.database.write(lambda tx: note_objects(tx, "file:///objects", "owner"), durable=True)
    await a_rollout(stage.store)
    assert await stage.move(stage.archive()) is not None
    assert not await stage.erasure.erase("child")
    queued = select(dead_objects.c.session_id)
    assert await stage.store.database.read(lambda c: c.execute(queued).scalars().all()) == ["child"], "its objects go"


async def test_a_generation_that_leaves_while_its_name_is_asked_for_does_not_free_it_yet(stage: Stage) -> None:
    assert not await Names(stage.cache, cast(Any, None))._frees_name(Generation("left", 1, "closed", None))


async def test_what_is_added_to_a_rollout_while_it_leaves_keeps_it(postgres_store: Store) -> None:
    store, file = postgres_store, "file:///archive"
    await a_rollout(store)
    fence = await store.submit(TakeLease(LEASE, store.me, 60.0, 60.0))
    lines = [Line(name, "root", None, None, None, "default", b"") for name in ("child", "root")]
    await store.submit(Reserve(fence, file, lines))
    added = update(sessions).where(sessions.c.session_id == "child").values(version=4)
    async with connected(store.database.url, writes=True) as connection:
        await connection.execute(added)
        leaving = asyncio.create_task(store.submit(Forget("root", fence, file, {"child": 3, "root": 3})))
        await waiters(store, 1)
    assert await leaving is False


async def test_of_two_rollouts_that_leave_at_once_the_log_ends_where_the_later_did(postgres_store: Store) -> None:
    store, file = postgres_store, "file:///archive"
    for name in ("earlier", "later"):
        await store.create(name)
        await store.close(name)
    end = await store.horizon()
    fence = await store.submit(TakeLease(LEASE, store.me, 60.0, 60.0))
    await store.submit(
        Reserve(fence, file, [Line(name, name, None, None, None, "default", b"") for name in ("earlier", "later")])
    )

    async with connected(store.database.url) as connection, asyncio.TaskGroup() as leaving, connection.begin():
        await connection.execute(select(events).where(events.c.session_id == "earlier").with_for_update())
        leaving.create_task(store.submit(Forget("earlier", fence, file, {"earlier": 2})))
        await waiters(store, 1)  # It has read where the log ends, if nothing keeps it from that.
        later = leaving.create_task(store.submit(Forget("later", fence, file, {"later": 2})))
        await waiters(store, 2, later)
    assert await store.database.read(last_forgotten) == end


async def test_the_look_for_what_is_left_to_do_does_not_read_the_whole_index(sqlite_store: Store) -> None:
    seen: list[str] = []

    def planned(connection: Connection) -> list[str]:
        event.listen(connection, "before_cursor_execute", lambda *given: seen.append(given[2]))
        unfinished(connection, most=1)
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {seen[-1]}", (1, 0))
        return [row[3] for row in plan]

    assert "USING INDEX ix_archived_state" in (await sqlite_store.database.read(planned))[0]
