"""Revision 0003 with data in the tables: attempts and weight versions come from the log, groups from the sessions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from alembic import command
from helpers.databases import alembic_config, connected, database_at, migrate
from helpers.log import BODY, committed, created
from helpers.store import Store
from sqlalchemy import Table, column, select, table

from app.domain import upcast
from app.domain.events import Event, VersionSpan, name_of
from app.sessions.groups import settle_groups
from app.store import group_reads
from app.store.engine import create_engine
from app.store.schema import groups, sessions

EVENTS = 2500
"""More than the migration reads at once, so that a session's log is met in two pages."""

SESSION_FIELDS = ("session_id", "version", "status", "open_turns", "turns", "group_id", "reward", "created_at")
_old_sessions = table("sessions", *map(column, (*SESSION_FIELDS, "updated_at", "body_hash", "closed_at")))
_old_events = table("events", *map(column, ("session_id", "seq", "type", "version", "at", "data", "position")))


def old_session(session_id: str, group_id: str | None, *, finished: bool) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "version": 1,
        "status": "closed" if finished else "open",
        "open_turns": 0,
        "turns": 0,
        "group_id": group_id,
        "reward": 1.0 if finished else None,
        "created_at": 1.0,
        "updated_at": 2.0,
        "body_hash": BODY,
        "closed_at": 2.0 if finished else None,
    }


def under(*versions: str) -> Event:
    spans = tuple(VersionSpan(version, at, at + 1) for at, version in enumerate(versions))
    return committed(1, 0, 1, weight_versions=spans)


LOGS: dict[str, tuple[str | None, bool, list[Event]]] = {
    "a-many": ("g", True, [created(attempt=7, group_id="g"), *(under(str(9 + n)) for n in range(EVENTS))]),
    "b-names": ("g", True, [created(attempt=0, group_id="g"), under("step-8", "two"), under()]),
    "c-mixed": ("h", False, [created(group_id="h"), under("12", "x", "3"), under("9" * 19), under("007")]),
    "d-plain": (None, True, [created()]),
}
EXPECTED = {
    "a-many": (7, EVENTS + 8),
    "b-names": (0, None),
    "c-mixed": (None, 12),
    "d-plain": (None, None),
}


async def fill(url: str) -> None:
    """As the release before wrote it."""
    heads = [old_session(name, group_id, finished=finished) for name, (group_id, finished, _) in LOGS.items()]
    rows = [
        {"session_id": name, "seq": seq, "type": name_of(event), "version": 1, "at": 1.0, "data": upcast.encode(event)}
        for name, (_, _, log) in LOGS.items()
        for seq, event in enumerate(log, 1)
    ]
    engine = create_engine(url)
    async with engine.begin() as connection:
        await connection.execute(_old_sessions.insert(), heads)
        if engine.dialect.name == "sqlite":
            await connection.execute(_old_events.insert(), [{**row, "position": at} for at, row in enumerate(rows, 1)])
        else:
            await connection.execute(_old_events.insert(), rows)
    await engine.dispose()


async def found(url: str, which: Table, *names: str) -> list[Any]:
    async with connected(url) as connection:
        columns = (which.c[name] for name in names)
        rows = list(await connection.execute(select(*columns).order_by(which.c[names[0]])))
    return [tuple(row) for row in rows]


async def settled(url: str) -> int | None:
    async with database_at(url) as database, Store.over(database) as store:
        await settle_groups(database, store.writer)
        return await database.read(group_reads.newest_version)


def as_expected(url: str) -> None:
    kept = asyncio.run(found(url, sessions, "session_id", "attempt", "weight_version"))
    assert {row[0]: row[1:] for row in kept} == EXPECTED
    assert asyncio.run(found(url, groups, "group_id")) == []
    assert asyncio.run(settled(url)) == EVENTS + 8
    rows = asyncio.run(found(url, groups, "group_id", "sessions", "unfinished", "completed_at", "acked_at"))
    assert rows == [("g", 2, 0, 2.0, None), ("h", 1, 1, None, None)]


def test_what_the_log_says_is_filled_in_going_up_down_and_up_again(empty_url: str) -> None:
    migrate(empty_url, "0002")
    asyncio.run(fill(empty_url))
    migrate(empty_url)
    as_expected(empty_url)
    command.downgrade(alembic_config(empty_url), "0002")
    assert len(asyncio.run(found(empty_url, sessions, "session_id", "reward"))) == len(LOGS)
    migrate(empty_url)
    as_expected(empty_url)


@pytest.mark.parametrize("revision", ["0002", "0003"])
def test_an_empty_database_goes_up_and_down(empty_url: str, revision: str) -> None:
    migrate(empty_url, revision)
    command.downgrade(alembic_config(empty_url), "base")
    migrate(empty_url)
