"""Damaged pages of PostgreSQL's own files: the same as on SQLite, session by session."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator

import pytest
from helpers.clusters import Cluster, running
from helpers.store import Store, reward
from integration.test_damaged_export import add, excluded, rows_of

from app.errors import SessionUnreadable
from app.export.query import ExportQuery
from app.sessions.all_events import AllEvents, EventQuery
from app.sessions.cache import SessionCache
from app.sessions.log_end import LogEnd
from app.store.engine import Database
from app.store.log import Appended
from ops.verify import verify_url

pytestmark = pytest.mark.long

PAGE_BYTES = 8192
SESSIONS = 120
NAMES = [f"session-{number:03}" for number in range(SESSIONS)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running(fsync="off") as made:
        asyncio.run(_fill(made.url))
        yield made


async def _fill(url: str) -> None:
    database = Database(url)
    await database.open()
    async with Store.over(database) as store:
        for number, name in enumerate(NAMES):
            await add(store, name, f"g{number // 4}", number / SESSIONS)
    await database.close()


def damage(cluster: Cluster, relation: str, page: int) -> None:
    """Overwrite a page of a table or an index while the server is down."""
    file = cluster.folder / cluster.sql(f"SELECT pg_relation_filepath('{relation}')")
    cluster.stop()
    assert file.stat().st_size > (page + 1) * PAGE_BYTES, "not its last page: that takes what is new"
    with file.open("r+b") as handle:
        handle.seek(page * PAGE_BYTES)
        handle.write(random.Random(relation).randbytes(PAGE_BYTES))
    cluster.start()


async def all_events_are_given(database: Database, lost: set[str], relation: str) -> None:
    """Those of the other sessions, in their order; of a transaction that cannot be read there is one line."""
    found = await AllEvents(database, LogEnd(database)).start(EventQuery())
    lines = [json.loads(line) async for piece in found for line in piece.splitlines()]
    unread = [line for line in lines if "error" in line]
    assert bool(unread) == (relation in ("events", "ix_events_tx_position"))
    if relation == "ix_events_tx_position":
        return
    for name in set(NAMES) - lost:
        seqs = [line["seq"] for line in lines if line.get("session_id") == name]
        assert seqs == list(range(1, len(seqs) + 1))
        assert len(seqs) > 2


@pytest.mark.parametrize(
    ("relation", "page"),
    [
        ("events", 2),
        ("sessions", 1),
        ("ix_events_tx_position", 1),
        ("turns", 1),
        ("pk_events", 1),
    ],
)
def test_a_damaged_page_is_its_sessions_business(cluster: Cluster, relation: str, page: int) -> None:
    damage(cluster, relation, page)

    async def look() -> None:
        database = Database(cluster.url)
        await database.open()
        async with Store.over(database) as store:
            rows = await rows_of(store, ExportQuery(explain=True, advantage="grpo"))
            lost = excluded(rows)
            assert sorted({row["session_id"] for row in rows}) == NAMES
            assert len(lost) < SESSIONS / 2
            assert all(reason.startswith("unreadable: the database answered SQLSTATE XX00") for reason in lost.values())
            if relation in ("events", "turns"):
                assert lost
            await all_events_are_given(database, set(lost), relation)
            cache = SessionCache(database, store.writer, 0)
            if relation == "events":
                for name in lost:
                    with pytest.raises(SessionUnreadable):
                        await cache.get(name)
            if relation == "sessions":
                await _write_to_all(store)
        await database.close()

    asyncio.run(look())
    report = asyncio.run(verify_url(cluster.url))
    assert report.problems
    assert report.sessions == SESSIONS


async def _write_to_all(store: Store) -> None:
    """In one batch: sessions whose heads are lost refuse, the others are written."""
    outcomes = await asyncio.gather(*(store.submit(reward(name, 1.0)) for name in NAMES), return_exceptions=True)
    refused = [one for one in outcomes if isinstance(one, SessionUnreadable)]
    written = [one for one in outcomes if isinstance(one, Appended)]
    assert refused
    assert len(written) + len(refused) == SESSIONS
