"""The writer: what waits together is committed together, and a fault stays with its owner."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from helpers.store import Store, claim, commit, create
from sqlalchemy import bindparam, select, text
from sqlalchemy.engine import make_url

from app.errors import Overloaded, StoreUnavailable
from app.store import writer as writer_module
from app.store.dialect import Tx
from app.store.log import Appended, Refused
from app.store.log_sessions import Existing
from app.store.schema import sessions

pytestmark = pytest.mark.anyio


class Broken:
    """Writes a session and then raises: our own mistake, not a client's."""

    durable: ClassVar[bool] = True
    runs_inline: ClassVar[bool] = False
    is_alone = False
    session_id = ""
    size = 100

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id

    def apply(self, tx: Tx) -> None:
        create(self.session_id).apply(tx)
        raise ValueError("broken")


class Looking:
    """Returns how the database will write the transaction: SQLite's FULL is 2, NORMAL is 1."""

    runs_inline: ClassVar[bool] = False
    is_alone = False
    size = 0

    def __init__(self, session_id: str, durable: bool) -> None:
        self.session_id = session_id
        self.durable = durable

    def apply(self, tx: Tx) -> Any:
        row = tx.one(text("SHOW synchronous_commit" if tx.is_remote else "PRAGMA synchronous"), {})
        return None if row is None else row[0]


class Holding:
    """Keeps SQLite's writing thread until it is let go; only what is durable runs there."""

    durable: ClassVar[bool] = True
    runs_inline: ClassVar[bool] = False
    is_alone = False
    session_id = ""
    size = 0

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()

    def apply(self, tx: Tx) -> None:
        self.entered.set()
        assert self.released.wait(10)


@contextmanager
def held(store: Store) -> Iterator[Holding]:
    """The writer is busy inside; what is submitted meanwhile waits in its queue."""
    holding = Holding()
    task = asyncio.ensure_future(store.submit(holding))
    try:
        yield holding
    finally:
        holding.released.set()
        assert not task.cancelled()


async def entered(holding: Holding) -> None:
    assert await asyncio.to_thread(holding.entered.wait, 10)


async def queued(store: Store, *operations: object) -> list[asyncio.Future[object]]:
    """Submitted and waiting: each has run up to its place in the queue."""
    tasks = [asyncio.ensure_future(store.submit(operation)) for operation in operations]
    await asyncio.sleep(0)
    return tasks


async def test_many_submits_at_once_take_few_transactions(store: Store) -> None:
    before = store.writer.counters.transactions
    made = await asyncio.gather(*(store.create(f"s{number}") for number in range(300)))
    assert all(isinstance(outcome, Appended) for outcome in made)
    assert store.writer.counters.operations == 300
    assert store.writer.counters.transactions - before <= 3


@pytest.mark.parametrize("durable", [(True,), (False,), (True, False), (False, True)])
async def test_a_batch_is_synced_if_any_of_its_operations_is_durable(store: Store, durable: tuple[bool, ...]) -> None:
    """Asked of the database itself, inside the transaction."""
    looking = [Looking(f"s{number}", is_durable) for number, is_durable in enumerate(durable)]
    settings = await asyncio.gather(*(store.submit(operation) for operation in looking))
    names = {True: 2, False: 1} if store.database.is_sqlite else {True: "on", False: "off"}
    assert settings == [names[any(durable)]] * len(durable)
    assert store.writer.counters.transactions == 1


async def test_claims_alone_need_no_durable_transaction_and_a_commit_does(store: Store) -> None:
    await store.create("s")
    before = store.writer.counters.durable_transactions
    await store.claim("s", 1)
    assert store.writer.counters.durable_transactions == before
    await store.commit("s", 2)
    assert store.writer.counters.durable_transactions == before + 1


async def test_a_batch_is_bounded_in_count_and_bytes(sqlite_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_BATCH", 4)
    await asyncio.gather(*(sqlite_store.create(f"s{number}") for number in range(12)))
    assert sqlite_store.writer.counters.transactions == 3
    monkeypatch.setattr(writer_module, "MAX_BATCH_BYTES", 1000)
    await asyncio.gather(*(sqlite_store.create(f"t{number}") for number in range(12)))
    assert sqlite_store.writer.counters.transactions == 3 + 6, "two of 512 bytes reach the bound"


async def test_an_operation_that_raises_fails_alone(store: Store) -> None:
    names = ["a", "b", "c", "d"]
    outcomes = await asyncio.gather(
        *(store.create(name) for name in names[:2]),
        store.submit(Broken("broken")),
        *(store.create(name) for name in names[2:]),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [Appended, Appended, ValueError, Appended, Appended]
    for name in names:
        await store.head_equals_fold(name)
    assert await store.head("broken") is None
    assert isinstance(await store.create("broken"), Appended)


async def test_operations_on_one_session_keep_their_order_in_a_batch(store: Store) -> None:
    """The order of submission is the order of effect, although a batch is sorted by session."""
    made, again, taken, done, late = await asyncio.gather(
        store.create("s"),
        store.create("s"),
        store.submit(claim("s", 1, store.me)),
        store.submit(commit("s", 2, store.me)),
        store.submit(commit("s", 2, store.me)),
    )
    assert isinstance(made, Appended)
    assert isinstance(again, Existing)
    assert isinstance(taken, Appended)
    assert isinstance(done, Appended)
    assert late == Refused("open")
    await store.head_equals_fold("s")


@pytest.mark.parametrize(("limit", "most"), [("MAX_QUEUE", 2), ("MAX_QUEUE_BYTES", 1000)])
async def test_a_full_queue_is_overloaded_and_what_waits_still_commits(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(writer_module, limit, most)
    monkeypatch.setattr(writer_module, "WAIT_S", 0.05)
    with held(sqlite_store) as holding:
        await entered(holding)
        waiting = await queued(sqlite_store, create("a"), create("b"))
        with pytest.raises(Overloaded):
            await sqlite_store.create("c")
    assert [type(outcome) for outcome in await asyncio.gather(*waiting)] == [Appended, Appended]
    assert await sqlite_store.head("c") is None
    assert isinstance(await sqlite_store.create("c"), Appended)


async def test_who_waits_for_room_gets_it(sqlite_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_QUEUE", 1)
    with held(sqlite_store) as holding:
        await entered(holding)
        waiting = await queued(sqlite_store, create("a"), create("b"))
    made = await asyncio.wait_for(asyncio.gather(*waiting), 3)
    assert [type(outcome) for outcome in made] == [Appended, Appended]


async def test_a_caller_that_gives_up_costs_nobody_else(sqlite_store: Store) -> None:
    with held(sqlite_store) as holding:
        await entered(holding)
        gone, kept = await queued(sqlite_store, create("a"), create("b"))
        gone.cancel()
    assert isinstance(await kept, Appended)
    assert isinstance(await sqlite_store.create("c"), Appended)


async def test_stop_commits_what_is_queued_and_refuses_what_comes_later(sqlite_store: Store) -> None:
    with held(sqlite_store) as holding:
        await entered(holding)
        (waiting,) = await queued(sqlite_store, create("a"))
        stopping = asyncio.ensure_future(sqlite_store.writer.stop())
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable):
            await sqlite_store.create("b")
    await stopping
    assert isinstance(await waiting, Appended)
    assert await sqlite_store.head("a") is not None


async def test_an_outcome_is_given_only_after_the_commit(sqlite_store: Store, sqlite_url: str) -> None:
    """Another connection, which sees only what is committed, finds what was acknowledged, at once."""
    other = sqlite3.connect(make_url(sqlite_url).database or "", isolation_level=None)
    for number in range(20):
        await sqlite_store.create(f"s{number}")
        assert other.execute("SELECT count(*) FROM sessions").fetchone() == (number + 1,)
    other.close()


@pytest.mark.parametrize("values", [bindparam("ids", expanding=True), ("open", "closed")], ids=["bound", "fixed"])
async def test_a_statement_with_a_list_of_values_is_refused_in_words(store: Store, values: Any) -> None:
    """Statements are compiled once, and this one has another text for each number of values."""
    listed = select(sessions.c.session_id).where(sessions.c.status.in_(values))
    with pytest.raises(TypeError, match=r"\.in_\(\)"):
        await store.database.write(lambda tx: tx.all(listed, {"ids": ["open"]}), durable=True)
