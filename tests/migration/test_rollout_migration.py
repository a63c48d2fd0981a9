"""Revision 0008 with data in the tables: roots come from the parents that sessions' first events name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from alembic import command
from helpers.databases import alembic_config, connected, database_at, migrate
from helpers.groups import Groups
from helpers.log import BODY, created
from helpers.store import Store
from sqlalchemy import column, select, table

from app.domain import upcast
from app.store import rollouts
from app.store.engine import create_engine
from app.store.schema import groups, sessions
from ops.verify import verify_url

pytestmark = pytest.mark.long

PARENTS: dict[str, str | None] = {
    "root": None,
    "agent": "root",
    "a-sub-agent": "agent",
    "orphan": "never",
    "z-below-it": "orphan",
    "self": "self",
    "here": "there",
    "there": "here",
    "beside": "there",
    "plain": None,
}
ROOTS = {
    "agent": "root",
    "a-sub-agent": "root",
    "orphan": "never",
    "z-below-it": "never",
    "beside": "there",
}
MANY = 2100
"""Children of one root: more than the migration reads at once."""

_FIELDS = (
    "session_id",
    "version",
    "status",
    "open_turns",
    "turns",
    "group_id",
    "created_at",
    "updated_at",
    "body_hash",
)
_old_sessions = table("sessions", *map(column, (*_FIELDS, "closed_at", "reward")))
_old_events = table("events", *map(column, ("session_id", "seq", "type", "version", "at", "data", "position")))
_old_groups = table("groups", *map(column, [each.name for each in groups.columns]))


def head(session_id: str, group_id: str | None) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "version": 1,
        "status": "open",
        "open_turns": 0,
        "turns": 0,
        "group_id": group_id,
        "created_at": 1.0,
        "updated_at": 1.0,
        "body_hash": BODY,
        "closed_at": None,
        "reward": None,
    }


def acknowledged(group_id: str) -> dict[str, Any]:
    values: dict[str, Any] = {each.name: None for each in groups.columns}
    counted = {"sessions": 1, "erased": 0, "unfinished": 1, "measured": False, "handed_out": 1}
    return {**values, **counted, "group_id": group_id, "consumer": "trainer", "acked_at": 5.0}


async def fill(url: str) -> None:
    """As the release before wrote it: agents with their root's group, and one with a group of its own."""
    parents = {**PARENTS, **{f"many-{number:04}": "agent" for number in range(MANY)}}
    group_of = {"root": "g", "agent": "g", "orphan": "h", "a-sub-agent": "own", "plain": "p"}
    heads = [head(session_id, group_of.get(session_id)) for session_id in parents]
    rows = [
        {
            "session_id": session_id,
            "seq": 1,
            "type": "SessionCreated",
            "version": 3,
            "at": 1.0,
            "data": upcast.encode(created(parent=parent, group_id=group_of.get(session_id))),
        }
        for session_id, parent in parents.items()
    ]
    engine = create_engine(url)
    async with engine.begin() as connection:
        await connection.execute(_old_sessions.insert(), heads)
        await connection.execute(_old_groups.insert(), [acknowledged("p")])
        if engine.dialect.name == "sqlite":
            rows = [{**row, "position": at} for at, row in enumerate(rows, 1)]
        await connection.execute(_old_events.insert(), rows)
    await engine.dispose()


async def stored(url: str) -> tuple[dict[str, str], dict[str, tuple[int, int, int, bool]]]:
    async with database_at(url) as database, Store.over(database) as store:
        query = select(sessions.c.session_id, sessions.c.root_id).where(sessions.c.root_id.is_not(None))
        roots = await database.read(lambda c: {row[0]: row[1] for row in c.execute(query)})
        counts = {group_id: await Groups(store).counts(group_id) for group_id in ("g", "h", "own", "p")}
        assert len(await database.read(lambda c: rollouts.members(c, ["root"], status=["open"]))) == MANY + 2
        return roots, counts


def as_expected(url: str) -> None:
    roots, counts = asyncio.run(stored(url))
    assert {name: root for name, root in roots.items() if not name.startswith("many-")} == ROOTS
    assert {root for name, root in roots.items() if name.startswith("many-")} == {"root"}
    assert counts == {
        "g": (1, 0, 1, False),
        "h": (1, 0, 1, False),
        "own": (0, 0, 0, False),
        "p": (1, 0, 1, False),
    }
    assert asyncio.run(acked(url)) == 5.0


async def acked(url: str) -> float | None:
    async with connected(url) as connection:
        found = (await connection.execute(select(groups.c.acked_at).where(groups.c.group_id == "p"))).scalar_one()
    return None if found is None else float(found)


def test_roots_are_filled_in_going_up_down_and_up_again(empty_url: str) -> None:
    migrate(empty_url, "0007")
    asyncio.run(fill(empty_url))
    migrate(empty_url)
    as_expected(empty_url)
    command.downgrade(alembic_config(empty_url), "0007")
    migrate(empty_url)
    as_expected(empty_url)
    assert [problem for problem in asyncio.run(verify_url(empty_url)).problems if "root" in problem.what] == []


@pytest.mark.parametrize("revision", ["0007", "0008"])
def test_an_empty_database_goes_up_and_down(empty_url: str, revision: str) -> None:
    migrate(empty_url, revision)
    command.downgrade(alembic_config(empty_url), "base")
    migrate(empty_url)
