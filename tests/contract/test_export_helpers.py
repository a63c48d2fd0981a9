"""Helper processes make the parts of an export as the server makes them itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from helpers.databases import database_at

from app.export.exporter import Exporter
from app.export.helpers import Helpers
from app.export.query import ExportQuery
from app.store.database import Database
from ops.bench.stored import copy_up_to, play
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess
from workers.pool import Pool

QUERIES: tuple[dict[str, Any], ...] = (
    {},
    {"format": "parquet", "shape": "miles"},
    {"format": "msgpack", "explain": True},
    {"branches": "all", "loss": "every", "explain": True},
    {"max_seq_len": 130, "truncate": "token"},
    {"limit": 7},
)
SOME_BYTES = 5_000
"""Stored content of a part: the store has many then."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("filled")
    with SimulatorProcess() as engine, ServerProcess(folder, upstreams=[engine.base_url]) as server:
        asyncio.run(play(server.base_url, sessions=8, turns=3))
    copy_up_to(server.database_path, 40)
    return server.environment["TURNLOG_DATABASE_URL"]


async def exported(database: Database, query: dict[str, Any], helpers: Helpers | None = None) -> bytes:
    started = await Exporter(database, "test", helpers=helpers).start(ExportQuery(**query), None)
    return b"".join([piece async for piece in started.pieces])


@asynccontextmanager
async def lent(deadline_s: float) -> AsyncIterator[tuple[Helpers, Pool]]:
    """A helper that is ready, for exports whose parts are small."""
    helpers = Helpers(1, deadline_s=deadline_s, memory_bytes=2 << 30, local_parts=0, part_bytes=SOME_BYTES)
    async with helpers.lent() as pool:
        while not pool.counters().alive:
            await asyncio.sleep(0.01)
        yield helpers, pool


def test_helpers_make_the_same_bytes(url: str) -> None:
    async def compare() -> int:
        async with database_at(url) as database, lent(deadline_s=60) as (helpers, pool):
            for query in QUERIES:
                whole = await exported(database, query)
                assert len(whole) > SOME_BYTES / 10, query
                assert await exported(database, query, helpers) == whole, query
            return pool.counters().jobs

    assert asyncio.run(compare()) > len(QUERIES)


def test_a_helper_that_is_killed_costs_no_row(url: str) -> None:
    async def compare() -> None:
        async with database_at(url) as database, lent(deadline_s=0.05) as (helpers, pool):
            [helper] = pool._children
            os.kill(helper.pid, signal.SIGSTOP)  # so that it does not answer in time
            assert await exported(database, {}, helpers) == await exported(database, {})
            while not pool.counters().crashes:
                await asyncio.sleep(0.01)

    asyncio.run(compare())
