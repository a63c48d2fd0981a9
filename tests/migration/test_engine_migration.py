"""Revision 0006 with data in the tables: a session's engine comes from the end of its log."""

from __future__ import annotations

import asyncio
from typing import Any

from alembic import command
from helpers.databases import alembic_config, migrate
from helpers.log import BODY, committed, created, opened
from sqlalchemy import column, select, table

from app.domain import upcast
from app.domain.events import Event, name_of
from app.store.engine import create_engine
from app.store.schema import sessions

MANY = 1100
"""More sessions than the migration fills in at a time."""

_old_sessions = table(
    "sessions",
    *map(
        column,
        ("session_id", "version", "status", "open_turns", "turns", "created_at", "updated_at", "body_hash"),
    ),
)
_old_events = table("events", *map(column, ("session_id", "seq", "type", "version", "at", "data", "position")))

LOGS: dict[str, list[Event]] = {
    "none": [created(), opened(1, 0)],
    "one": [created(), opened(1, 0), committed(1, 0, 2, engine="http://one")],
    "two": [
        created(),
        committed(1, 0, 2, engine="http://one"),
        committed(2, 1, 3, engine="http://two"),
        opened(3, 2),
    ],
    **{f"many-{number:04}": [created(), committed(1, 0, 2, engine=f"http://{number}")] for number in range(MANY)},
}
EXPECTED = {"none": None, "one": "http://one", "two": "http://two", "damaged": None} | {
    f"many-{number:04}": f"http://{number}" for number in range(MANY)
}


async def fill(url: str) -> None:
    """As the release before wrote it, with one event that cannot be read."""
    rows: list[dict[str, Any]] = [
        {"session_id": name, "seq": seq, "type": name_of(event), "version": 1, "at": 1.0, "data": upcast.encode(event)}
        for name, log in LOGS.items()
        for seq, event in enumerate(log, 1)
    ]
    damaged = {"session_id": "damaged", "seq": 1, "type": "TurnCommitted", "version": 1, "at": 1.0, "data": b"\xff{"}
    heads = [
        {
            "session_id": name,
            "version": len(log),
            "status": "open",
            "open_turns": 0,
            "turns": sum(name_of(event) == "TurnCommitted" for event in log),
            "created_at": 1.0,
            "updated_at": 1.0,
            "body_hash": BODY,
        }
        for name, log in LOGS.items()
    ]
    engine = create_engine(url)
    async with engine.begin() as connection:
        await connection.execute(_old_sessions.insert(), [*heads, {**heads[-1], "session_id": "damaged"}])
        numbered = [{**row, "position": at} for at, row in enumerate([*rows, damaged], 1)]
        if engine.dialect.name != "sqlite":
            for row in numbered:
                del row["position"]
        await connection.execute(_old_events.insert(), numbered)
    await engine.dispose()


async def found(url: str) -> dict[str, str | None]:
    engine = create_engine(url)
    async with engine.connect() as connection:
        rows = list(await connection.execute(select(sessions.c.session_id, sessions.c.engine)))
    await engine.dispose()
    return {row[0]: row[1] for row in rows}


def test_the_engine_of_the_last_turn_is_filled_in_going_up_down_and_up_again(empty_url: str) -> None:
    migrate(empty_url, "0005")
    asyncio.run(fill(empty_url))
    migrate(empty_url)
    assert asyncio.run(found(empty_url)) == EXPECTED
    command.downgrade(alembic_config(empty_url), "0005")
    migrate(empty_url)
    assert asyncio.run(found(empty_url)) == EXPECTED
