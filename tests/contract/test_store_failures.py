"""What a driver's error means to a client, and what must not look like the store's fault."""

from __future__ import annotations

import sqlite3

import pytest
from helpers.store import Store
from sqlalchemy import insert

from app.errors import StoreFull, StoreUnavailable
from app.store import reads
from app.store.dialect import store_error
from app.store.engine import Database
from app.store.log import Refused
from app.store.schema import store_meta

pytestmark = pytest.mark.anyio


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


async def test_commit_after_close_is_refused_and_leaves_no_content(store: Store) -> None:
    await store.create("s")
    await store.claim("s", 1)
    await store.close("s")
    assert await store.commit("s", 2) == Refused("closed")
    assert await store.database.read(lambda c: reads.load_frames(c, "s", [1])) == {}
