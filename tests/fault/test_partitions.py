"""Partitions on a real PostgreSQL: begun, emptied and dropped while turns commit and others read, and with kills."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from typing import Any, cast

import pytest
from alembic import command
from helpers.databases import alembic_config, connected, database_at, migrate
from helpers.store import Store
from sqlalchemy.ext.asyncio import AsyncConnection

from app.crash_points import VARIABLE
from app.store.all_events import EventFilter, page
from app.store.engine import Database
from app.store.packs.rows import TakeKeeping
from app.store.partitions import (
    LOOK_S,
    TABLES,
    BeginPartition,
    DropPartition,
    MoveRows,
    PartitionKeeper,
    clock,
    parts_of,
    sessions_in,
)
from app.store.reads import END, START

pytestmark = [pytest.mark.anyio, pytest.mark.long]

TOKEN = "test"

KILLED = """
import asyncio, sys
from app.store import partitions
from app.store.engine import Database
from app.store.writer import Writer

async def main():
    database = Database(sys.argv[1])
    await database.open()
    writer = Writer(database)
    writer.start()
    await writer.submit(getattr(partitions, sys.argv[2])(*eval(sys.argv[3])))

asyncio.run(main())
"""


class Clock:
    """Each look at it is a round later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += LOOK_S
        return self.now


def keeper(store: Store) -> PartitionKeeper:
    return PartitionKeeper(store.database, store.writer, Clock())


async def numbers(store: Store, table: str = "events") -> tuple[int, ...]:
    return (await store.database.read(partial(parts_of, table=table))).numbers


async def order(store: Store) -> list[tuple[object, ...]]:
    """All events with their places, as the feed gives them."""
    found = await store.database.read(lambda c: page(c, START, END, EventFilter(), 100_000))
    return [(row.place, row.session_id, row.row) for row in found.rows]


async def begun(store: Store, *, sessions: int = 40) -> int:
    """Sessions with a turn in the first partition, and a second one begun; its number."""
    await store.submit(TakeKeeping(TOKEN))
    for number in range(sessions):
        await store.create(f"s{number}")
        await store.take_turn(f"s{number}")
    await keeper(store).round(TOKEN)
    return (await numbers(store))[-1]


async def delete_all_but(url: str, kept: str) -> None:
    """As archiving does."""
    async with connected(url, writes=True) as connection:
        for table in TABLES:
            await connection.exec_driver_sql(f"DELETE FROM {table} WHERE session_id <> '{kept}'")


async def test_new_rows_go_into_a_partition_that_was_begun(postgres_store: Store) -> None:
    store = postgres_store
    newest = await begun(store, sessions=2)
    assert await numbers(store) == (0, newest)
    assert await numbers(store, "chunks") == (0,), "nothing was in it"
    await store.take_turn("s0")
    for number, sessions in ((0, ["s0", "s1"]), (newest, ["s0"])):
        assert await store.database.read(partial(sessions_in, table="turns", number=number, limit=9)) == sessions
    session = await store.session("s0")
    assert session is not None
    assert len(session.turns) == 2
    await store.head_equals_fold("s0")


async def test_what_is_left_moves_with_its_places_and_the_partition_is_dropped(
    postgres_store: Store, postgres_url: str
) -> None:
    store = postgres_store
    newest = await begun(store)
    await delete_all_but(postgres_url, "s3")
    before = await order(store)
    keeping = keeper(store)
    await keeping.round(TOKEN)
    assert await numbers(store) == (0, newest)
    assert await order(store) == before
    async with connected(postgres_url) as reader:
        await reader.exec_driver_sql("SELECT 1")  # its snapshot may be older than the move
        await keeping.round(TOKEN)
        assert await numbers(store) == (0, newest)
    await keeping.round(TOKEN)
    assert [await numbers(store, table) for table in ("events", "turns")] == [(newest,), (newest,)]
    assert await order(store) == before
    await store.take_turn("s3")
    await store.head_equals_fold("s3")


class Emptied:
    """The database of a keeper: just before it first looks for rows of a partition, a reader begins, whose snapshot has
    some, and then they are deleted."""

    is_sqlite = False

    def __init__(self, store: Store, url: str, reader: AsyncConnection) -> None:
        self._database = store.database
        self._url = url
        self._reader: AsyncConnection | None = reader

    async def read(self, function: Any) -> Any:
        if self._reader is not None and function.func is sessions_in:
            reader, self._reader = self._reader, None
            await reader.execution_options(isolation_level="REPEATABLE READ")
            await reader.exec_driver_sql("SELECT 1 FROM sessions")
            await delete_all_but(self._url, "nobody")
        return await self._database.read(function)


async def test_a_partition_stays_while_a_reader_may_find_rows_in_it(postgres_store: Store, postgres_url: str) -> None:
    store = postgres_store
    newest = await begun(store)
    async with connected(postgres_url) as reader:
        emptied = cast(Database, Emptied(store, postgres_url, reader))
        keeping = PartitionKeeper(emptied, store.writer, Clock())
        await keeping.round(TOKEN)
        rows = await reader.exec_driver_sql("SELECT count(DISTINCT session_id) FROM events")
        assert rows.scalar_one() == 40
        assert await numbers(store) == (0, newest)
    await keeping.round(TOKEN)
    assert await numbers(store) == (newest,)


async def test_nothing_is_done_with_an_old_token(postgres_store: Store) -> None:
    store = postgres_store
    newest = await begun(store)
    await store.submit(TakeKeeping("other"))
    for operation in (
        BeginPartition(TOKEN, "events", newest + 1),
        MoveRows(TOKEN, "s1", "events", 0, newest),
        DropPartition(TOKEN, "events", 0, 0.0),
    ):
        assert await store.submit(operation) is False
    assert await numbers(store) == (0, newest)


async def test_a_partition_with_a_row_is_not_dropped(postgres_store: Store) -> None:
    newest = await begun(postgres_store)
    assert await postgres_store.submit(DropPartition(TOKEN, "events", 0, 0.0)) is False
    assert await numbers(postgres_store) == (0, newest)


async def test_a_table_in_use_is_left_for_the_next_round(postgres_store: Store, postgres_url: str) -> None:
    store = postgres_store
    async with connected(postgres_url) as reader:
        await reader.exec_driver_sql("SELECT 1 FROM events")
        newest = await begun(store, sessions=1)
        assert newest == 0
        await store.take_turn("s0")
    await keeper(store).round(TOKEN)
    assert len(await numbers(store)) == 2


async def test_partitions_change_while_turns_commit_and_others_read(postgres_store: Store, postgres_url: str) -> None:
    store = postgres_store
    newest = await begun(store, sessions=8)
    busy = True
    taken = dict.fromkeys((f"s{number}" for number in range(8)), 1)

    async def turns(session_id: str) -> None:
        while busy:
            await store.take_turn(session_id)
            taken[session_id] += 1

    async def reading() -> None:
        seen = 0
        while busy:
            found = await order(store)
            assert len(found) >= seen, "events are missing"
            seen = len(found)

    async with asyncio.TaskGroup() as tasks:
        for session_id in list(taken):
            tasks.create_task(turns(session_id))
        tasks.create_task(reading())
        for step in range(1, 4):
            await _begin(store, newest + step)
            for session_id in taken:
                await store.submit(MoveRows(TOKEN, session_id, "events", newest + step - 1, newest + step))
        busy = False
    for session_id, count in taken.items():
        session = await store.session(session_id)
        assert session is not None
        assert len(session.turns) == count
    places = [row[0] for row in await order(store)]
    assert len(places) == len(set(places)) == sum(1 + 2 * count for count in taken.values())


async def _begin(store: Store, number: int) -> None:
    assert await store.submit(BeginPartition(TOKEN, "events", number))


async def test_a_kill_in_the_middle_leaves_the_partitions_as_they_were(
    postgres_store: Store, postgres_url: str
) -> None:
    store = postgres_store
    newest = await begun(store)
    await delete_all_but(postgres_url, "s3")
    before = await order(store)
    empty_since = await store.database.read(clock)
    steps = (
        ("in_begin_partition", BeginPartition(TOKEN, "events", newest + 1)),
        ("in_move_rows", MoveRows(TOKEN, "s3", "events", 0, newest)),
        ("in_drop_partition", DropPartition(TOKEN, "events", 0, empty_since)),
    )
    for point, operation in steps:
        found = await numbers(store)
        fields = tuple(getattr(operation, name) for name in operation.__struct_fields__)
        command_line = [sys.executable, "-c", KILLED, postgres_url, type(operation).__name__, repr(fields)]
        done = await asyncio.to_thread(
            subprocess.run, command_line, env={**os.environ, VARIABLE: point}, capture_output=True, check=False
        )
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        assert await numbers(store) == found
        assert await order(store) == before
        assert await store.submit(operation)
        assert await order(store) == before
    assert await numbers(store) == (newest, newest + 1)


def test_a_store_of_before_keeps_every_row_up_and_down(postgres_url: str) -> None:
    async def fill() -> list[tuple[object, ...]]:
        async with database_at(postgres_url) as database, Store.over(database) as store:
            await begun(store, sessions=3)
            await store.take_turn("s0")
            return await order(store)

    async def look() -> tuple[list[tuple[object, ...]], tuple[int, ...]]:
        async with database_at(postgres_url) as database, Store.over(database) as store:
            found, parts = await order(store), await numbers(store)
            await store.take_turn("s1")
            assert (await order(store))[: len(found)] == found
            return found, parts

    before = asyncio.run(fill())
    command.downgrade(alembic_config(postgres_url), "0013")
    migrate(postgres_url)
    assert asyncio.run(look()) == (before, (0,))
    command.check(alembic_config(postgres_url))
