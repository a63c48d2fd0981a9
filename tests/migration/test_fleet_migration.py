"""Revision 0005 with data in the tables: a store of the release before is taken over, a claim in flight included."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

from alembic import command
from fault.verified import verified
from helpers.databases import alembic_config, connected, database_at, migrate
from helpers.log import BODY, committed
from helpers.looking import value
from helpers.store import Store
from sqlalchemy import column, insert, select, table

from app.domain.events import AffinityBound, SessionConfig, SessionCreated, TurnCommitted, TurnOpened
from app.domain.fleet import Fleet, FleetPaused, apply
from app.domain.session import OpenTurn
from app.domain.upcast import encode
from app.store import fleet
from app.store.fleet import AppendFleet
from app.store.log import Appended
from app.store.schema import affinities

BEFORE = "0004"

LOG: list[tuple[str, int, bytes]] = [
    (
        "SessionCreated",
        2,
        b'{"config":{"rollback_window":1,"adapter":"a","on_drift":"reject"},"body_hash":"%s"}' % BODY.encode(),
    ),
    ("TurnOpened", 2, b'{"turn":1,"parent":0,"incarnation":1,"body_hash":"%s","protocol":"chat"}' % BODY.encode()),
    ("TurnCommitted", 3, encode(committed(1, 0, 2, trimmed=0, cached_tokens=3, sent_ids=True)).rpartition(b"#")[0]),
    ("TurnOpened", 2, b'{"turn":2,"parent":1,"incarnation":1,"body_hash":"%s","retry_key":"k"}' % BODY.encode()),
]
"""As the release before wrote it: a session with one turn, and another in flight."""

_events = table("events", *map(column, ("session_id", "seq", "type", "version", "at", "data", "position")))
_sessions = table(
    "sessions",
    *map(column, ("session_id", "version", "status", "open_turns", "turns", "created_at", "updated_at", "body_hash")),
)
_old_claims = ("session_id", "fence", "turn", "parent_turn", "incarnation", "body_hash", "retry_key", "opened_at")
_open_turns = table("open_turns", *map(column, _old_claims))


async def over(url: str, work: Any) -> Any:
    async with database_at(url) as database, Store.over(database) as store:
        return await work(store)


def fill(url: str) -> None:
    """Rows of revision 0004, whose code is no longer here."""
    head = {"session_id": "s", "version": len(LOG), "status": "open", "open_turns": 1, "turns": 1}
    claim = ("s", 4, 2, 1, 1, BODY, "k", 1.0)
    statements: list[Any] = [
        insert(_sessions).values(**head, created_at=1.0, updated_at=1.0, body_hash=BODY),
        insert(_open_turns).values(dict(zip(_old_claims, claim, strict=True))),
    ]
    for seq, (name, version, fields) in enumerate(LOG, 1):
        row = {"session_id": "s", "seq": seq, "type": name, "version": version, "at": 1.0, "data": stored(fields)}
        statements.append(insert(_events).values(row | ({"position": seq} if url.startswith("sqlite") else {})))

    async def run() -> None:
        async with connected(url, writes=True) as connection:
            for statement in statements:
                await connection.execute(statement)

    asyncio.run(run())


def stored(fields: bytes) -> bytes:
    return b"%b#%08x" % (fields, zlib.crc32(fields))


async def is_taken_over(store: Store) -> None:
    log = [recorded.event for recorded in await store.log("s")]
    assert log == [
        SessionCreated(SessionConfig(1, adapter="a", on_drift="reject"), BODY),
        TurnOpened(1, 0, 1, BODY, is_provisional=True),
        committed(1, 0, 2, cached_tokens=3, sent_ids=True),
        TurnOpened(2, 1, 1, BODY, "k", is_provisional=True),
    ]
    session = await store.loaded("s")
    assert session is not None
    assert (session.affinity, session.open_turn) == (None, OpenTurn(2, 1, 4, 1, BODY, "k", None))
    [row] = await store.open_turns("s")
    assert (row.fence, row.adapter) == (4, None)
    await store.head_equals_fold("s")
    assert (await store.database.read(fleet.state)).events == []


async def goes_on(store: Store) -> None:
    """The claim of before ends in a commit of today, which binds the session."""
    done = await store.commit("s", 4, incarnation=1, turn=2, parent=1, before=[AffinityBound("http://engine")])
    assert isinstance(done, Appended)
    session = await store.session("s")
    assert session is not None
    assert session.affinity is not None
    assert (session.affinity.engine, len(session.turns)) == ("http://engine", 2)
    placed = await store.submit(AppendFleet(0, FleetPaused(1, 0.0), 60.0))
    seen = await store.database.read(fleet.state)
    assert seen.events == [placed]
    assert apply(Fleet(), placed).is_shut("a")
    row = ("agent", "http://engine", "bound", False, 300.0, 1e12, 1, "s")
    values = dict(zip(affinities.c.keys(), row, strict=True))
    await store.database.write(lambda tx: tx.insert(insert(affinities), [values]), durable=True)


async def lost_the_fleet_alone(store: Store) -> None:
    """What 0004 has no tables for is gone, and nothing else."""
    assert (await store.database.read(fleet.state)).events == []
    assert await store.database.read(lambda connection: list(connection.execute(select(affinities)))) == []
    session = await store.session("s")
    assert session is not None
    assert [type(recorded.event) for recorded in await store.log("s")].count(TurnCommitted) == 2
    assert session.affinity is not None
    await store.take_turn("s")


def test_a_store_of_the_release_before_goes_up_down_and_up_again(empty_url: str) -> None:
    migrate(empty_url, BEFORE)
    fill(empty_url)
    migrate(empty_url)
    asyncio.run(over(empty_url, is_taken_over))
    command.downgrade(alembic_config(empty_url), BEFORE)
    assert value(empty_url, "SELECT count(*) FROM open_turns") == 1
    migrate(empty_url)
    asyncio.run(over(empty_url, is_taken_over))
    asyncio.run(over(empty_url, goes_on))
    command.downgrade(alembic_config(empty_url), BEFORE)
    assert value(empty_url, "SELECT count(*) FROM events WHERE session_id = 's'") == len(LOG) + 2
    migrate(empty_url)
    asyncio.run(over(empty_url, lost_the_fleet_alone))


def test_a_claim_and_its_adapter_outlive_going_down(database_url: str) -> None:
    async def claimed(store: Store) -> None:
        await store.create("s")
        assert isinstance(await store.claim("s", 1, adapter="a"), Appended)
        assert (await store.open_turns("s"))[0].adapter == "a"

    asyncio.run(over(database_url, claimed))
    command.downgrade(alembic_config(database_url), BEFORE)
    migrate(database_url)
    assert value(database_url, "SELECT adapter FROM open_turns") == "a"
    verified(database_url)
