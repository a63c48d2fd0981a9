"""`turnlog replay --heads`: heads and claims that are not the log's are found and mended, on real stores."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.log import created
from helpers.store import Store, create, end_incarnation
from helpers.warm import popen
from sqlalchemy import select

from app.features.groups.schema import group_changes
from app.store import repair
from app.store.database import Database
from app.store.log_sessions import Create
from app.store.schema import open_turns, sessions
from integration.filled import execute, fill, opened, replay
from integration.stand import until
from ops.server import ServerProcess

pytestmark = pytest.mark.long

Environment = Callable[..., None]
Lines = Callable[[], list[str]]

DAMAGE = {
    "a head that lags": ("UPDATE sessions SET version = 3 WHERE session_id = 'talked'", {"sessions.version"}),
    "a wrong status": ("UPDATE sessions SET status = 'open' WHERE session_id = 'erased'", {"sessions.status"}),
    "miscounted": (
        "UPDATE sessions SET turns = 9, open_turns = 1 WHERE session_id = 'talked'",
        {"sessions.turns", "sessions.open_turns"},
    ),
    "a lost reward": ("UPDATE sessions SET reward = NULL WHERE session_id = 'talked'", {"sessions.reward"}),
    "a reward nobody gave": ("UPDATE sessions SET reward = 2.5 WHERE session_id = 'cut'", {"sessions.reward"}),
    "annotations nobody wrote": (
        "UPDATE sessions SET annotated = 'x' WHERE session_id = 'talked'",
        {"sessions.annotated"},
    ),
    "other times": (
        "UPDATE sessions SET created_at = 0, updated_at = 0, closed_at = 0 WHERE session_id = 'idle'",
        {"sessions.created_at", "sessions.updated_at", "sessions.closed_at"},
    ),
    "another creator": (
        "UPDATE sessions SET group_id = 'x', body_hash = 'x', attempt = 5 WHERE session_id = 'Created'",
        {"sessions.group_id", "sessions.body_hash", "sessions.attempt"},
    ),
    "newer weights": (
        "UPDATE sessions SET weight_version = 2 WHERE session_id = 'talked'",
        {"sessions.weight_version"},
    ),
    "a head that is gone": ("DELETE FROM sessions WHERE session_id = 'waiting'", {"sessions"}),
    "a claim that is gone": ("DELETE FROM open_turns", {"open_turns[2]"}),
    "a claim of nobody": (
        "INSERT INTO open_turns SELECT 'talked', 99, turn, parent_turn, 1, 'x', NULL, 0, NULL, NULL FROM open_turns",
        {"open_turns[99]"},
    ),
    "a claim with another holder": (
        "UPDATE open_turns SET incarnation = 77, opened_at = 0",
        {"open_turns[2].incarnation", "open_turns[2].opened_at"},
    ),
}


def heads(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """The rows that are derived from the log."""

    async def run(database: Database) -> dict[str, list[tuple[Any, ...]]]:
        return {
            table.name: [
                tuple(row)
                for row in await database.read(
                    lambda c, t=table: c.execute(select(t).order_by(t.c.session_id)).all()  # type: ignore[misc]
                )
            ]
            for table in (sessions, open_turns)
        }

    return asyncio.run(opened(url, run))  # type: ignore[no-any-return]


def places(said: Lines) -> set[str]:
    return {json.loads(line)["place"] for line in said()}


def test_derived_rows_are_those_that_the_operations_wrote(filled: str, said: Lines) -> None:
    assert replay(["--heads"]) == 0
    assert said() == []


def test_damage_is_found_and_mended(filled: str, said: Lines) -> None:
    before = heads(filled)
    for damage, (statement, expected) in DAMAGE.items():
        execute(filled, statement)
        damaged = heads(filled)
        assert damaged != before, damage
        assert (replay(["--heads", "--json"]), places(said)) == (1, expected), damage
        assert heads(filled) == damaged, damage
        assert (replay(["--heads", "--fix", "--json"]), places(said)) == (0, expected), damage
        assert heads(filled) == before, damage
    assert replay(["--heads"]) == 0


def test_a_damaged_log_is_reported_and_the_others_are_mended(filled: str, said: Lines) -> None:
    execute(filled, "DELETE FROM events WHERE session_id = 'talked' AND seq = 3")
    execute(filled, "UPDATE sessions SET version = 77 WHERE session_id IN ('talked', 'waiting')")
    assert replay(["--heads", "--fix"]) == 1
    assert said() == [
        "talked: the log cannot be read: session talked has version 2; event 4 does not follow",
        "waiting: sessions.version is 77, the log says 2: fixed",
    ]
    assert {row[0]: row[1] for row in heads(filled)["sessions"]}["talked"] == 77


def test_the_whole_table_is_built_anew(filled: str) -> None:
    before = heads(filled)
    execute(filled, "DELETE FROM sessions")
    execute(filled, "DELETE FROM open_turns")
    assert replay(["--heads", "--fix"]) == 0
    assert heads(filled) == before


def test_the_groups_of_a_mended_head_are_noted_as_changed(filled: str) -> None:
    async def made(database: Database) -> None:
        create = Create("grouped", 1.0, created(group_id="right"), None)
        await database.write(create.apply, durable=True)

    asyncio.run(opened(filled, made))
    execute(filled, "UPDATE sessions SET group_id = 'wrong' WHERE session_id = 'grouped'")
    execute(filled, "DELETE FROM group_changes")

    async def noted(database: Database) -> list[str]:
        return await database.read(
            lambda connection: list(connection.execute(select(group_changes.c.group_id)).scalars())
        )

    assert replay(["--heads"]) == 1
    assert asyncio.run(opened(filled, noted)) == []
    assert replay(["--heads", "--fix"]) == 0
    assert sorted(asyncio.run(opened(filled, noted))) == ["right", "wrong"]


@pytest.mark.parametrize("sign", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_an_interrupted_fix_is_taken_up(
    database_url: str, said: Lines, clean_environment: Environment, sign: int
) -> None:
    many = 400

    async def create_many(database: Database) -> None:
        async with Store.over(database) as store:
            await asyncio.gather(*(store.submit(create(f"s{number}")) for number in range(many)))
            await end_incarnation(database, store.me)

    asyncio.run(opened(database_url, create_many))
    clean_environment(DATABASE_URL=database_url)
    before = heads(database_url)
    execute(database_url, "UPDATE sessions SET version = 9")
    command = [sys.executable, "-m", "turnlog.cli", "replay", "--heads", "--fix"]
    with popen(command, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(b": fixed\n")
        process.send_signal(sign)
        reported = 1 + process.stdout.read().count(b": fixed\n")
    assert process.returncode == (130 if sign == signal.SIGINT else -sign)
    left = sum(row[1] == 9 for row in heads(database_url)["sessions"])
    assert 0 < left <= many - reported
    assert replay(["--heads", "--fix"]) == 0
    assert len(said()) == left
    assert heads(database_url) == before


def test_a_served_file_is_read_and_not_written(
    sqlite_url: str, said: Lines, tmp_path: Path, clean_environment: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    clean_environment(DATABASE_URL=sqlite_url)
    asyncio.run(opened(sqlite_url, fill))
    execute(sqlite_url, "UPDATE sessions SET turns = 9 WHERE session_id = 'cut'")
    with ServerProcess(tmp_path, database_url=sqlite_url):
        assert replay(["--heads"]) == 1
        assert said() == ["cut: sessions.turns is 9, the log says 0"]
        assert replay(["--heads", "--fix"]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert replay(["--heads"]) == 1
    assert replay(["--heads", "--fix"]) == 0


def test_postgresql_is_not_mended_while_a_process_may_live(
    postgres_url: str, tmp_path: Path, clean_environment: Environment
) -> None:
    clean_environment(DATABASE_URL=postgres_url, LEASE_S="3")
    asyncio.run(opened(postgres_url, fill))
    with ServerProcess(tmp_path, database_url=postgres_url, environment={"TURNLOG_LEASE_S": "3"}) as server:
        execute(postgres_url, "UPDATE sessions SET turns = 9 WHERE session_id = 'cut'")
        assert replay(["--heads", "--fix"]) == 2
        assert replay(["--heads"]) == 1
        server.kill()
    until(lambda: replay(["--heads", "--fix"]) == 0)
    assert replay(["--heads"]) == 0


def test_a_head_without_a_log_is_reported_and_kept(filled: str, said: Lines) -> None:
    execute(filled, "DELETE FROM events WHERE session_id = 'waiting'")
    before = heads(filled)
    for options in ([], ["--fix"]):
        assert replay(["--heads", "--json", *options]) == 1
        lines = [json.loads(line) for line in said()]
        assert [line["place"] for line in lines] == ["sessions", "open_turns[2]"]
        assert all(line["from_log"] is None and not line["fixed"] for line in lines)
    assert heads(filled) == before


@pytest.mark.anyio
async def test_sessions_in_motion_are_sound(store: Store) -> None:
    names = [f"s{number}" for number in range(3)]
    for name in names:
        await store.create(name)

    async def talk(name: str) -> None:
        for _ in range(40):
            await store.take_turn(name)

    talking = asyncio.gather(*(talk(name) for name in names))
    looks = 0
    while not talking.done():
        found = [one async for one in repair.examined(store.database)]
        assert [one for one in found if not one.sound] == []
        looks += len(found)
    await talking
    assert looks > 10
