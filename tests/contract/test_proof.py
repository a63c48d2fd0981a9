"""What proves that events come back in the order of commits, and what a database is refused for."""

from __future__ import annotations

import asyncio

import pytest
from helpers.databases import Postgres, connected, database_at
from helpers.store import Store
from sqlalchemy import func, select, text

from app.errors import StartupError
from app.sessions.proof import Proof
from app.store import feed, repair
from app.store.repair import StoreUnordered
from app.store.schema import events

pytestmark = pytest.mark.anyio


async def count(store: Store) -> int:
    return await store.database.read(lambda c: c.execute(select(func.count()).select_from(events)).scalar_one())


async def test_a_proof_leaves_nothing_for_others_to_read(store: Store) -> None:
    await store.create("s")
    before, end = await count(store), await store.database.read(feed.end)
    await asyncio.gather(*(repair.prove(store.database, store.me) for _ in range(4)))
    assert await count(store) == before
    assert await store.database.read(feed.end) == end
    proving = Proof(store.database, lambda: store.me)
    await proving.at_start()
    assert (proving.unwritable, proving.is_ordered) == (None, True)
    await store.create("t")
    assert await count(store) > before


OTHER_IDS = """
CREATE FUNCTION renumber() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.tx := {}; RETURN NEW; END';
CREATE TRIGGER renumbered BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION renumber();
"""
"""As where a row is written by another server, which counts transactions itself."""

OTHER_SNAPSHOT = """
CREATE SCHEMA other;
CREATE FUNCTION other.pg_current_snapshot() RETURNS pg_snapshot LANGUAGE sql AS 'SELECT ''{}''::pg_snapshot';
ALTER ROLE CURRENT_USER IN DATABASE {database} SET search_path = other, pg_catalog, public;
"""
"""As where a statement is answered by another server than the one that has committed."""

HIDDEN = """
CREATE RULE elsewhere AS ON INSERT TO events DO INSTEAD NOTHING;
"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (OTHER_IDS.format("1 << 60"), "are read as"),
        (OTHER_SNAPSHOT.format("3:9000000000:3", database="{database}"), "the oldest transaction that runs is 3"),
        (HIDDEN, "[] are read as"),
    ],
)
async def test_a_database_that_does_not_keep_the_order_is_refused(postgres: Postgres, change: str, told: str) -> None:
    with postgres.database() as url:
        name = url.rpartition("/")[2].partition("?")[0]
        async with connected(url, writes=True) as connection:
            for statement in change.strip().replace("{database}", name).split(";\n"):
                await connection.execute(text(statement.rstrip(";")))
        async with database_at(url) as database, Store.over(database) as store:
            proving = Proof(database, lambda: store.me)
            with pytest.raises(StartupError) as refused:
                await proving.at_start()
            assert told in str(refused.value)
            assert "not give events back in the order of commits" in str(refused.value)
            assert "\n" not in str(refused.value)
            assert not proving.is_ordered
            assert await count(store) == 0


async def test_a_dump_of_another_server_is_refused_until_its_restore_is_finished(postgres_store: Store) -> None:
    store = postgres_store
    await store.create("s")
    async with connected(store.database.url, writes=True) as connection:
        await connection.execute(text("UPDATE events SET tx = tx + 1000000"))
    with pytest.raises(StoreUnordered, match="turnlog restore"):
        await repair.prove(store.database, store.me)


async def test_a_long_transaction_delays_readers_and_is_no_reason_to_refuse(postgres_store: Store) -> None:
    async with connected(postgres_store.database.url, writes=True) as connection:
        await connection.execute(text("SELECT pg_current_xact_id()"))
        await repair.prove(postgres_store.database, postgres_store.me)


async def test_statements_of_one_transaction_that_run_apart_write_nothing(store: Store) -> None:
    """A pooler in statement mode gives each to another connection, and each is committed by itself."""

    class Apart:
        def __init__(self) -> None:
            self.asked = 0

        def one(self, *_: object) -> tuple[int, float]:
            self.asked += 1
            return 100 + self.asked, 0.0

    with pytest.raises(StoreUnordered, match="two statements of one transaction ran in two"):
        repair.write_probe(Apart(), store.me)  # type: ignore[arg-type]
