"""Damaged pages of PostgreSQL's own files: the same as on SQLite, session by session."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.clusters import DATABASE, ROLE, running
from helpers.databases import database_at
from helpers.store import Store, reward
from integration.test_damaged_export import add, excluded, rows_of

from app.errors import SessionUnreadable
from app.export.query import ExportQuery
from app.sessions.all_events import AllEvents, EventQuery
from app.sessions.cache import SessionCache
from app.sessions.log_end import LogEnd
from app.store.database import Database
from app.store.log import Appended
from ops.verify import verify_url

pytestmark = pytest.mark.long

PAGE_BYTES = 8192
SESSIONS = 80
NAMES = [f"session-{number:03}" for number in range(SESSIONS)]


RELATIONS = {"events": 2, "sessions": 1, "ix_events_tx_position": 1, "turns": 1, "pk_events": 1}
"""Tables and indexes, and the page of each that is damaged: not its last one, which takes what is new."""


@pytest.fixture
def damaged() -> Iterator[dict[str, str]]:
    """By relation the URL of a database in which its page was overwritten while the server was down."""
    with running(fsync="off") as cluster:
        asyncio.run(_fill(cluster.url))
        urls: dict[str, str] = {}
        places: dict[str, Path] = {}
        for relation in RELATIONS:
            cluster.sql(f"CREATE DATABASE of_{relation} TEMPLATE {DATABASE} OWNER {ROLE}", "postgres")
            urls[relation] = f"{cluster.url.removesuffix(DATABASE)}of_{relation}"
            path = cluster.sql(f"SELECT pg_relation_filepath('{relation}')", f"of_{relation}")
            places[relation] = cluster.folder / path
        cluster.stop()
        for relation, page in RELATIONS.items():
            assert places[relation].stat().st_size > (page + 1) * PAGE_BYTES
            with places[relation].open("r+b") as handle:
                handle.seek(page * PAGE_BYTES)
                handle.write(random.Random(relation).randbytes(PAGE_BYTES))
        cluster.start()
        yield urls


async def _fill(url: str) -> None:
    async with database_at(url) as database, Store.over(database) as store:
        for number, name in enumerate(NAMES):
            await add(store, name, f"g{number // 4}", number / SESSIONS)


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


def test_a_damaged_page_is_its_sessions_business(damaged: dict[str, str]) -> None:
    async def look(relation: str) -> None:
        async with database_at(damaged[relation]) as database, Store.over(database) as store:
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

    for relation, url in damaged.items():
        asyncio.run(look(relation))
        report = asyncio.run(verify_url(url))
        assert report.problems, relation
        assert report.sessions == SESSIONS


async def _write_to_all(store: Store) -> None:
    """In one batch: sessions whose heads are lost refuse, the others are written."""
    outcomes = await asyncio.gather(*(store.submit(reward(name, 1.0)) for name in NAMES), return_exceptions=True)
    refused = [one for one in outcomes if isinstance(one, SessionUnreadable)]
    written = [one for one in outcomes if isinstance(one, Appended)]
    assert refused
    assert len(written) + len(refused) == SESSIONS
