"""Revision 0007 with data in the tables: what earlier erasures left in the log is taken out, and nothing else."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

from alembic import command
from helpers.databases import alembic_config, migrate
from helpers.log import BODY, created
from sqlalchemy import select, text

from app.domain import upcast
from app.domain.events import Event, RewardAssigned, SessionClosed, SessionErased, UnknownEvent, name_of
from app.store.engine import create_engine
from app.store.schema import events, sessions

MANY = 40
"""More rewards than the migration looks at at a time."""

COMPONENTS = {"style-ü": 0.1, "length": -2.0}
CLOSED = [created(), RewardAssigned(0.5, COMPONENTS), SessionClosed()]
LOGS: dict[str, list[Event]] = {
    "open": CLOSED[:2],
    "closed": CLOSED,
    "erased": [*CLOSED, RewardAssigned(1.0, COMPONENTS, 1), RewardAssigned(0.25), SessionErased()],
    "plain": [created(), RewardAssigned(0.25), SessionClosed(), SessionErased()],
    "many": [created(), *(RewardAssigned(float(n), {str(n): 1.0}) for n in range(MANY)), SessionErased()],
}
EXPECTED: dict[str, list[Event]] = LOGS | {
    "erased": [
        created(),
        RewardAssigned(0.5, components_erased=True),
        SessionClosed(),
        RewardAssigned(1.0, turn=1, components_erased=True),
        RewardAssigned(0.25),
        SessionErased(),
    ],
    "many": [created(), *(RewardAssigned(float(n), components_erased=True) for n in range(MANY)), SessionErased()],
}


def stored(event: Event) -> bytes:
    """As the release before wrote it."""
    fields = upcast.encode(event).rpartition(b"#")[0]
    return b"%b#%08x" % (fields, zlib.crc32(fields))


async def fill(url: str) -> None:
    rows: list[dict[str, Any]] = [
        {"session_id": name, "seq": seq, "type": name_of(event), "version": 1, "at": 1.0, "data": stored(event)}
        for name, log in LOGS.items()
        for seq, event in enumerate(log, 1)
    ]
    odd = {"session_id": "erased", "type": "RewardAssigned", "version": 1, "at": 1.0}
    whole = stored(RewardAssigned(0.5, COMPONENTS))
    rows += [
        {**odd, "seq": 7, "data": whole.rpartition(b"#")[0]},
        {**odd, "seq": 8, "data": whole.replace(b"length", b"lenght")},
        {**odd, "seq": 9, "data": b"\xff\xfelength"},
        {**odd, "seq": 10, "data": b"[1]"},
    ]
    statuses = {"open": "open", "closed": "closed"}
    heads = [
        {
            "session_id": name,
            "version": len(log),
            "status": statuses.get(name, "erased"),
            "open_turns": 0,
            "turns": 0,
            "created_at": 1.0,
            "updated_at": 1.0,
            "body_hash": BODY,
        }
        for name, log in LOGS.items()
    ]
    engine = create_engine(url)
    async with engine.begin() as connection:
        await connection.execute(sessions.insert(), heads)
        numbered = [{**row, "position": at} for at, row in enumerate(rows, 1)]
        await connection.execute(events.insert(), rows if engine.dialect.name != "sqlite" else numbered)
    await engine.dispose()


async def found(url: str) -> dict[str, list[tuple[Event | None, bytes]]]:
    """By session, each event (None: it cannot be read) and its bytes."""
    engine = create_engine(url)
    columns = (events.c.session_id, events.c.type, events.c.version, events.c.data)
    query = select(*columns).order_by(events.c.session_id, events.c.seq)
    async with engine.connect() as connection:
        rows = list(await connection.execute(query))
    await engine.dispose()
    logs: dict[str, list[tuple[Event | None, bytes]]] = {}
    for session_id, name, version, data in rows:
        try:
            event = upcast.decode(name, version, data)
        except UnknownEvent:
            event = None
        logs.setdefault(session_id, []).append((event, data))
    return logs


async def is_sampled(url: str) -> bool:
    """Has PostgreSQL's planner samples of the log's data?"""
    engine = create_engine(url)
    try:
        async with engine.begin() as connection:
            if engine.dialect.name != "postgresql":
                return False
            await connection.execute(text("ANALYZE events"))
            query = text("SELECT count(*) FROM pg_stats WHERE tablename = 'events' AND attname = 'data'")
            return bool((await connection.execute(query)).scalar_one())
    finally:
        await engine.dispose()


def test_what_earlier_erasures_left_is_taken_out(empty_url: str) -> None:
    migrate(empty_url, "0006")
    asyncio.run(fill(empty_url))
    untouched = asyncio.run(found(empty_url))
    assert asyncio.run(is_sampled(empty_url)) == empty_url.startswith("postgresql")
    for _ in range(2):
        migrate(empty_url)
        logs = asyncio.run(found(empty_url))
        for name in ("open", "closed", "plain"):
            assert logs[name] == untouched[name], name
        odd = logs["erased"][len(EXPECTED["erased"]) :]
        assert odd[0][0] == RewardAssigned(0.5, components_erased=True), "a row without a checksum gets one"
        assert odd[1:] == [(None, b"")] * 3, "of what is damaged nothing is left"
        events_of = {name: [event for event, _ in log] for name, log in logs.items()}
        events_of["erased"] = events_of["erased"][: -len(odd)]
        assert events_of == EXPECTED
        assert not asyncio.run(is_sampled(empty_url))
        command.downgrade(alembic_config(empty_url), "0006")
