"""Processes of two releases on one PostgreSQL: whoever migrates it and whoever serves it wait for each other."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import pytest
from helpers.databases import connected, transaction
from helpers.store import Store, add_incarnation
from sqlalchemy import text, update

from app.composition import store_points
from app.domain import events, fleet
from app.domain.columns import Column
from app.errors import StartupError, StoreLost
from app.extras import release
from app.sessions.recovery import Recovery, register
from app.store import incarnations
from app.store.database import Database
from app.store.incarnations import host_name, require_unserved
from app.store.opening import change_revision, keep_revision, revision_head
from app.store.schema import incarnations as table
from app.store.writer import Writer
from workers.codec import Exchange, Messages, StoredTokens

pytestmark = pytest.mark.anyio

REVISION, STORED = "0001", "9681b67bed615208"
LEASE_S = 60.0
MIGRATE = text("UPDATE alembic_version SET version_num = 'next'")
LOST = "the database was migrated to revision next"


def test_what_is_stored_otherwise_has_another_revision() -> None:
    """Whoever changes an event or stored content adds a revision, which changes no table, and pins both. An older
    release would refuse what a newer one has written, so that they may not serve one store together."""
    logged = {**events.TYPES, **fleet.TYPES}
    content = StoredTokens, Exchange, Messages, Column
    _, kinds = msgspec.json.schema_components([*logged.values(), *content])
    for one in kinds.values():
        one.pop("description", None)
    versions = {name: kind.VERSION for name, kind in logged.items()}
    digest = hashlib.sha256(json.dumps([kinds, versions], sort_keys=True).encode()).hexdigest()[:16]
    assert (revision_head(), digest) == (REVISION, STORED)


class Process:
    """A process of this release; `lost` is what it was told it has lost."""

    def __init__(self, url: str) -> None:
        self.lost: list[str] = []
        self.database = Database(url, lost=self.lost.append, points=store_points())


@pytest.fixture
async def process(postgres_url: str) -> AsyncIterator[Process]:
    made = Process(postgres_url)
    await made.database.open()
    yield made
    await made.database.close()


async def migrate(url: str) -> None:
    async with connected(url, writes=True) as connection:
        await connection.run_sync(change_revision, LEASE_S)
        await connection.execute(MIGRATE)


async def until_somebody_waits(url: str) -> None:
    async with asyncio.timeout(60), connected(url) as connection:
        while not await connection.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted")):
            await asyncio.sleep(0.01)


async def test_who_registers_during_a_migration_takes_no_turn(process: Process, postgres_url: str) -> None:
    async with connected(postgres_url, writes=True) as connection:
        await connection.run_sync(change_revision, LEASE_S)
        registering = asyncio.create_task(register(process.database))
        await until_somebody_waits(postgres_url)
        await connection.execute(MIGRATE)
    with pytest.raises(StoreLost, match=LOST):
        await registering
    assert process.lost == [LOST]


async def test_a_migration_waits_for_who_registers_and_is_refused(postgres_url: str) -> None:
    async with transaction(postgres_url) as within:
        await within(keep_revision)
        await within(partial(incarnations.register, alone=False))
        migrating = asyncio.create_task(migrate(postgres_url))
        await until_somebody_waits(postgres_url)
    with pytest.raises(StartupError) as refused:
        await migrating
    [line] = refused.value.lines
    head = revision_head()
    assert line.startswith(f"1 process serves this database ({release()} on {host_name().partition('/')[0]}, pid ")
    assert f", pid {os.getpid()}, since 20" in line
    assert f"), which is at revision {head}; this version ({release()}) needs {head}: stop them, run `" in line


async def test_a_process_that_was_frozen_notices_by_its_heartbeat(process: Process, postgres_url: str) -> None:
    """The migration has found it dead. What it still had in hand is not written."""
    number = await register(process.database)
    recovery = Recovery(process.database, Writer(process.database), lambda: number, LEASE_S, 0.01, lambda: 0.0)
    await process.database.write(partial(incarnations.end, incarnation=number), durable=False)
    await migrate(postgres_url)
    recovery.start()
    async with asyncio.timeout(60):
        while not process.lost:
            await asyncio.sleep(0.01)
    with pytest.raises(StoreLost, match=LOST):
        await process.database.write(partial(incarnations.heartbeat, incarnation=number), durable=False)
    await recovery.stop()
    assert process.lost == [LOST]
    async with connected(postgres_url) as connection:
        assert await connection.run_sync(incarnations.living, LEASE_S) == []


async def test_the_first_few_are_named_and_none_of_this_host_that_has_ended(postgres_store: Store) -> None:
    database = postgres_store.database
    await database.write(partial(incarnations.end, incarnation=postgres_store.me), durable=False)
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = await add_incarnation(database, host_name())
    change: Any = update(table).where(table.c.id == gone).values(pid=ended.pid)
    await database.write(lambda tx: tx.run(change, {}), durable=False)
    look = partial(require_unserved, lease_s=LEASE_S, todo=": stop them")
    await database.read(look)
    for number in range(6):
        await add_incarnation(database, f"host-{number}/boot")
    with pytest.raises(StartupError) as refused:
        await database.read(look)
    [line] = refused.value.lines
    assert line.startswith("6 processes serve this database (0.1.0 on host-0, pid 1, since 20")
    assert [f"host-{number}," in line for number in range(6)] == [True] * 4 + [False] * 2
    assert line.endswith(" UTC; 2 more): stop them; a killed process counts until 60 s after its last heartbeat")
