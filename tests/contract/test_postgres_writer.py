"""PostgreSQL's writer when connections end at the worst moments, and when others hold its rows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from unittest.mock import Mock

import asyncpg
import pytest
from helpers.databases import connected
from helpers.store import Store, claim, commit, create, reward
from sqlalchemy import func, select, text
from sqlalchemy.engine import make_url

from app.errors import StoreUnavailable
from app.store import feed, postgres, writer
from app.store.database import Database
from app.store.dialect import StorePoints, Tx
from app.store.log import Appended, BaseOperation, Refused
from app.store.log_sessions import Existing, SaveSnapshot
from app.store.log_turns import Busy, Stale
from app.store.postgres import PostgresWriter
from app.store.schema import sessions
from app.store.writer import apply_all

pytestmark = pytest.mark.anyio

COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"
"""A simple query, as it stands in the protocol."""


class Relay:
    """Between a client and the server's socket; ends connections around their COMMIT as often as it is told.
    `is_synced`: the newest transaction waits for disk and standby."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self.before_commit = 0
        self.after_commit = 0
        self.is_synced = False
        self.serving: list[asyncio.Task[None]] = []

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.append(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, here = await asyncio.open_unix_connection(self._socket)
        muted = asyncio.Event()
        back = asyncio.create_task(_pump(there, writer, muted))
        try:
            while data := await reader.read(1 << 16):
                if b"synchronous_commit" in data:
                    self.is_synced = b"synchronous_commit = on" in data
                if COMMIT in data and self.before_commit:
                    self.before_commit -= 1
                    return
                if COMMIT in data and self.after_commit:
                    self.after_commit -= 1
                    muted.set()
                here.write(data)
        finally:
            back.cancel()
            writer.transport.abort()
            here.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, muted: asyncio.Event) -> None:
    """Pass the server's answers on; once muted, the next of them ends the connection instead."""
    while data := await reader.read(1 << 16):
        if muted.is_set():
            break
        writer.write(data)
    writer.transport.abort()


@pytest.fixture
async def relay(postgres_url: str) -> AsyncIterator[tuple[Relay, Store]]:
    """A store that is reached through the relay."""
    url = make_url(postgres_url)
    made = Relay(f"{url.query['host']}/.s.PGSQL.{url.port or 5432}")
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        through = url.set(host="127.0.0.1", port=port, query={})
        database = Database(through.render_as_string(hide_password=False), points=StorePoints())
        await database.open()
        async with Store.over(database) as store:
            yield made, store
        await database.close()
        for serving in made.serving:
            serving.cancel()
        await asyncio.gather(*made.serving, return_exceptions=True)
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def locking(database: Database, session_id: str) -> AsyncIterator[None]:
    """Somebody else holds the session's row."""
    row = select(sessions.c.version).where(sessions.c.session_id == session_id).with_for_update()
    async with connected(database.url, writes=True) as connection:
        await connection.execute(row)
        yield


async def test_a_connection_lost_before_its_commit_is_committed_on_another(relay: tuple[Relay, Store]) -> None:
    cutting, store = relay
    cutting.before_commit = 2
    assert isinstance(await store.create("s"), Appended)
    assert cutting.before_commit == 0
    assert len(await store.log("s")) == 1


async def test_what_was_committed_when_the_connection_ended_is_not_written_twice(relay: tuple[Relay, Store]) -> None:
    cutting, store = relay
    await store.create("s")
    cutting.after_commit = 1
    assert isinstance(await store.submit(reward("s", 1.0)), Appended)
    assert cutting.after_commit == 0
    assert len(await store.log("s")) == 2
    cutting.after_commit = 1
    assert isinstance(await store.claim("s", 2), Appended)
    assert cutting.is_synced, "the look for what became of it, though a claim itself is not"
    cutting.after_commit = 1
    assert isinstance(await store.commit("s", 3), Appended)
    assert len(await store.log("s")) == 4


async def test_a_commit_without_an_event_that_nobody_can_look_up_is_unavailable(relay: tuple[Relay, Store]) -> None:
    cutting, store = relay
    await store.create("s")
    cutting.after_commit = 1
    with pytest.raises(StoreUnavailable):
        await store.submit(SaveSnapshot("s", 1, "session-0", b"x"))
    assert isinstance(await store.submit(SaveSnapshot("s", 1, "session-0", b"x")), type(None))


@pytest.mark.parametrize("error", [asyncpg.DeadlockDetectedError, asyncpg.LockNotAvailableError, asyncpg.DiskFullError])
async def test_a_look_for_a_commit_that_fails_does_not_repeat_it(
    relay: tuple[Relay, Store], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    cutting, store = relay
    await store.create("s")
    cutting.after_commit = 1
    monkeypatch.setattr(PostgresWriter, "_holds", Mock(side_effect=error("of the look")))
    with pytest.raises(StoreUnavailable):
        await store.submit(reward("s", 1.0))
    assert len(await store.log("s")) == 2


async def test_a_server_that_stays_away_is_unavailable_in_time(
    relay: tuple[Relay, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "RECONNECT_S", 0.5)
    cutting, store = relay
    cutting.before_commit = 1000
    with pytest.raises(StoreUnavailable):
        await store.create("s")
    assert cutting.before_commit < 999
    cutting.before_commit = 0
    assert isinstance(await store.create("s"), Appended)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is held is waited for longer than a test takes."""
    monkeypatch.setattr(writer, "LOCK_RETRY_S", 600.0)


@pytest.mark.usefixtures("patient")
async def test_a_row_that_somebody_holds_keeps_only_its_own_session_waiting(postgres_store: Store) -> None:
    store = postgres_store
    names = [f"s{number}" for number in range(6)]
    await asyncio.gather(*(store.create(name) for name in names))
    async with locking(store.database, "s3"):
        waiting = [asyncio.ensure_future(store.claim(name, 1)) for name in names]
        others = [task for name, task in zip(names, waiting, strict=True) if name != "s3"]
        async with asyncio.timeout(60):
            assert all(isinstance(outcome, Appended) for outcome in await asyncio.gather(*others))
        assert not waiting[3].done()
    assert isinstance(await waiting[3], Appended)


@pytest.mark.usefixtures("patient")
async def test_held_rows_one_after_the_other_keep_nobody_else_waiting(postgres_store: Store) -> None:
    """More of them than a process has lanes."""
    store = postgres_store
    held = [f"h{number}" for number in range(store.database.lanes + 1)]
    for name in (*held, "free"):
        await store.create(name)
    async with contextlib.AsyncExitStack() as stack:
        waiting = []
        for name in held:
            await stack.enter_async_context(locking(store.database, name))
            waiting.append(asyncio.ensure_future(store.submit(reward(name, 1.0))))
            await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            assert isinstance(await store.claim("free", 1), Appended)
        assert not any(task.done() for task in waiting)
    assert all(isinstance(outcome, Appended) for outcome in await asyncio.gather(*waiting))


class WaitsForLock(BaseOperation, frozen=True):
    """Keeps its transaction open until the advisory lock is free."""

    session_id: str

    def apply(self, tx: Tx) -> None:
        tx.one(_LOCK, {})


_LOCK = select(func.pg_advisory_xact_lock(4711))


async def test_what_comes_during_a_transaction_is_gathered_for_the_next(
    postgres_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lasts longer than GATHER_S holds nobody up: the others then get one of their own."""
    store = postgres_store
    for gather_s in (60.0, 0.0):
        monkeypatch.setattr(writer, "GATHER_S", gather_s)
        names = [f"s{number}-{gather_s}" for number in range(4)]
        before = store.writer.counters.transactions
        async with connected(store.database.url, writes=True) as connection:
            await connection.execute(_LOCK)
            waiting = asyncio.ensure_future(store.submit(WaitsForLock("nobody")))
            while not (await store.database.read_autocommit(_WAITING, {}))[0][0]:
                await asyncio.sleep(0)
            others = [asyncio.ensure_future(store.create(name)) for name in names[:2]]
            await store.database.read(feed.epoch)
            others += [asyncio.ensure_future(store.create(name)) for name in names[2:]]
            if not gather_s:
                await asyncio.gather(*others)
            await store.database.read(feed.epoch)
            assert [task.done() for task in (waiting, *others)] == [False] + 4 * [not gather_s]
        await asyncio.gather(waiting, *others)
        if gather_s:
            assert store.writer.counters.transactions == before + 2


_WAITING = select(func.count()).select_from(text("pg_locks")).where(text("locktype = 'advisory' AND NOT granted"))


async def test_a_row_that_is_held_too_long_is_unavailable(
    postgres_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LOCK_RETRY_S", 0.3)
    await postgres_store.create("s")
    async with locking(postgres_store.database, "s"):
        with pytest.raises(StoreUnavailable):
            await postgres_store.submit(reward("s", 1.0))
    assert isinstance(await postgres_store.submit(reward("s", 1.0)), Appended)


async def test_a_claim_on_another_log_of_the_same_length_is_stale(store: Store) -> None:
    """As after a crash that undid what was not synced, and other events in its place."""
    await store.create("s", at=1.0)
    assert await store.submit(claim("s", 1, store.me, last_event_at=1.5)) == Stale()
    assert isinstance(await store.submit(claim("s", 1, store.me, last_event_at=1.0)), Appended)


async def test_a_batch_in_sets_gives_each_operation_its_own_outcome(store: Store) -> None:
    """Winners and losers of every kind in one transaction, on each store alike."""
    for name in ("free", "held", "closed", "own", "lost", "rewarded", "there"):
        await store.create(name)
    await store.close("closed")
    for name in ("held", "own", "lost"):
        await store.claim(name, 1)
    await store.release("lost", 2)

    operations = [
        claim("free", 1, store.me),
        claim("held", 1, store.me),
        claim("closed", 1, store.me),
        commit("own", 2, store.me),
        commit("lost", 2, store.me),
        reward("rewarded", 0.5),
        create("new"),
        create("there"),
        create("twice"),
        create("twice"),
    ]

    def run(tx: Tx) -> list[object]:
        return apply_all(tx, operations)

    outcomes = await store.database.write(run, durable=True)
    kinds = [Appended, Busy, Refused, Appended, Refused, Appended, Appended, Existing, Appended, Existing]
    assert [type(outcome) for outcome in outcomes] == kinds
    for name in ("free", "held", "own", "lost", "rewarded", "new", "there"):
        await store.head_equals_fold(name)
