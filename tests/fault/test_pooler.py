"""A pooler in transaction mode between Turnlog and PostgreSQL: migrations, turns, exports, with `POOLED` in the URL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest
from helpers.clusters import Cluster
from helpers.databases import migrate
from integration.stand import until

from fault.agents import turns
from fault.pooler import Pooler
from fault.processes import Processes, crowd, serving
from fault.table import Tally
from fault.verified import verified
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

POOLED = "?prepared_statement_cache_size=0"
TITLE = "behind a pooler in transaction mode, which ends transactions"
WISH = {"latency_s": 0.03, "completion_tokens": 8}


@pytest.fixture
def pooler(cluster: Cluster) -> Iterator[Pooler]:
    with Pooler(cluster.port) as made:
        yield made


@pytest.fixture
def processes(cluster: Cluster, pooler: Pooler, engine: SimulatorProcess, tmp_path: Path) -> Iterator[Processes]:
    with serving(tmp_path, 2, cluster.url_at(pooler.port) + POOLED, engine.base_url) as made:
        yield made


def through(pooler: Pooler, work: Callable[[asyncpg.Connection], Awaitable[object]], **settings: object) -> object:
    """Run `work` on a driver's connection to the pooler."""

    async def connected() -> object:
        connection = await asyncpg.connect(
            host="127.0.0.1", port=pooler.port, user="turnlog", database="turnlog", **settings
        )
        try:
            return await work(connection)
        finally:
            connection.terminate()

    return asyncio.run(connected())


async def keep_a_statement(connection: asyncpg.Connection) -> None:
    """A statement that is parsed in one transaction and used in others."""
    statement = await connection.prepare("SELECT 1")
    for _ in range(20):
        await statement.fetchval()


async def keep_a_setting(connection: asyncpg.Connection) -> set[str]:
    """What `SHOW` says in transactions after a `SET`."""
    await connection.execute("SET lock_timeout = '7s'")
    return {(await connection.fetchval("SHOW lock_timeout")) for _ in range(20)}


def test_the_pooler_forgets_statements_and_settings_between_transactions(pooler: Pooler) -> None:
    with pytest.raises(asyncpg.InvalidSQLStatementNameError):
        through(pooler, keep_a_statement)
    assert through(pooler, keep_a_setting, statement_cache_size=0) == {"0", "7s"}


def test_migrations_run_through_it(pooler: Pooler, cluster: Cluster) -> None:
    cluster.sql("DROP DATABASE IF EXISTS pooled", "postgres")
    cluster.sql("CREATE DATABASE pooled OWNER turnlog", "postgres")
    url = cluster.url_at(pooler.port).removesuffix("/turnlog") + "/pooled" + POOLED
    migrate(url)
    assert cluster.sql("SELECT count(*) FROM alembic_version", "pooled") == "1"


step = turns(WISH, group_id="pooled")


@pytest.mark.fault(14, TITLE)
def test_turns_and_exports_go_through_it(cluster: Cluster, pooler: Pooler, processes: Processes, tally: Tally) -> None:
    """Also while the pooler's own connections to PostgreSQL are ended under it."""
    with crowd(processes, 6, step) as agents:
        until(lambda: len(agents.acknowledged) >= 30, 180)
        tally.tried = cluster.end_connections()
        until(lambda: len(agents.acknowledged) >= 60, 180)
    assert {answer.status for answer in agents.answers()} <= {200, 503}
    assert len(pooler.handed_out) > 1
    assert not pooler.refused
    processes.are_the_same()
    with httpx.Client(base_url=processes.urls[0], timeout=60) as http:
        rows = [json.loads(line) for line in http.get("/export").content.splitlines()]
        until(lambda: http.get("/ready").is_success)
    assert sum(len(row["turns"]) for row in rows) == len(agents.acknowledged)
    tally.doubled += agents.doubled(processes.urls[1])
    verified(cluster.url_at(pooler.port) + POOLED, agents.acknowledged, tally)
