"""Connections that die, drivers' errors: the right error, never a guess."""

from __future__ import annotations

import asyncio
import sqlite3

import pytest
from helpers.store import Store, create
from sqlalchemy import insert, text
from sqlalchemy.engine import make_url
from sqlalchemy.util import await_only

from app.errors import StoreFull, StoreUnavailable
from app.store import postgres, writer
from app.store.database import Database
from app.store.dialect import Tx, store_error
from app.store.log import Appended
from app.store.schema import store_meta

pytestmark = pytest.mark.anyio


async def test_what_a_killed_connection_had_written_is_not_there(
    postgres_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "RECONNECT_S", 0.3)

    def cut(tx: Tx) -> None:
        create("s").apply(tx)
        tx.run(text("SELECT pg_terminate_backend(pg_backend_pid())"), {})

    with pytest.raises(StoreUnavailable):
        await postgres_store.database.write(cut, durable=True)
    assert await postgres_store.head("s") is None
    assert isinstance(await postgres_store.create("s"), Appended)


async def test_a_connection_killed_between_statements_is_replaced(postgres_store: Store) -> None:
    """The driver then speaks of a closed connection, without a code of the server's."""
    victims: list[int] = []
    database = postgres_store.database

    def other_kills(tx: Tx) -> None:
        tx.all(text("SELECT pg_terminate_backend(:pid)"), {"pid": victims[0]})

    def cut(tx: Tx) -> None:
        row = tx.one(text("SELECT pg_backend_pid()"), {})
        assert row is not None
        victims.append(row[0])
        if len(victims) == 1:
            await_only(database.write(other_kills, durable=False))
            await_only(asyncio.sleep(0.1))
        create("s").apply(tx)

    await database.write(cut, durable=True)
    assert len(set(victims)) == 2
    assert len(await postgres_store.log("s")) == 1


async def test_a_claim_that_meets_a_foreign_lock_waits_beside_the_event_loop(
    sqlite_store: Store, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim is written on the loop itself, which must not stand still for somebody else's lock."""
    monkeypatch.setattr(writer, "LOCKED_S", 600.0)
    await sqlite_store.create("s")
    foreign = sqlite3.connect(make_url(sqlite_url).database or "", isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    waiting = asyncio.ensure_future(sqlite_store.claim("s", 1))
    async with asyncio.timeout(60):
        for _ in range(5):
            assert await sqlite_store.head("s") is not None
    assert not waiting.done()
    foreign.execute("ROLLBACK")
    foreign.close()
    assert isinstance(await waiting, Appended)


async def test_a_mistake_of_ours_is_not_told_as_the_stores(database: Database) -> None:
    """A unique violation is a bug here: it must not look like an outage that a retry mends."""
    row = {"key": "epoch", "value": "2"}
    statement = insert(store_meta)
    with pytest.raises(Exception, match=r"(?i)unique") as raised:
        await database.write(lambda tx: tx.insert(statement, [row]), durable=True)
    assert not isinstance(raised.value, StoreUnavailable | StoreFull)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("SQLITE_FULL", StoreFull),
        ("SQLITE_TOOBIG", StoreFull),
        ("SQLITE_BUSY", StoreUnavailable),
        ("SQLITE_BUSY_SNAPSHOT", StoreUnavailable),
        ("SQLITE_IOERR_FSYNC", StoreUnavailable),
        ("SQLITE_READONLY", StoreUnavailable),
        ("SQLITE_CORRUPT", StoreUnavailable),
        ("SQLITE_CONSTRAINT_UNIQUE", type(None)),
        ("SQLITE_ERROR", type(None)),
    ],
)
def test_sqlite_error_codes(code: str, kind: type) -> None:
    error = sqlite3.OperationalError("a text that nobody reads")
    error.sqlite_errorcode = getattr(sqlite3, code)
    error.sqlite_errorname = code
    assert type(store_error(error)) is kind


def test_a_connection_error_names_no_address() -> None:
    error = store_error(ConnectionRefusedError("secret-host:5432"))
    assert isinstance(error, StoreUnavailable)
    assert "secret-host" not in str(error)
