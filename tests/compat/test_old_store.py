"""A store that an earlier release wrote opens, folds and exports what it did, but for what was changed on purpose.

`stores` has one file a release, named by its commit and made by `compat.make`: its store, and all that it said of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.databases import Postgres, migrate
from integration.stand import Stand, serving, user
from sqlalchemy import MetaData, create_engine, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from app.store.engine import create_engine as create_async_engine
from compat.allowed import ALLOWED
from compat.answers import QUIET, STORE, Archive, Asker, unpack
from compat.compare import Allowed, Difference, added, differences, unexpected
from compat.story import AGENT
from ops.simulator.process import SimulatorProcess
from ops.verify import verify_url

STORES = sorted((Path(__file__).parent / "stores").glob("*.tar.xz"))


@pytest.fixture(
    scope="module",
    params=[STORES[0], *(pytest.param(path, marks=pytest.mark.long) for path in STORES[1:])],
    ids=[path.name.partition(".")[0] for path in STORES],
)
def release(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def old(release: Path) -> Archive:
    return unpack(release)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, old: Archive, tmp_path: Path) -> Iterator[str]:
    """The old store, upgraded."""
    file = tmp_path / STORE
    file.write_bytes(old.store)
    if request.param == "sqlite":
        found = f"sqlite+aiosqlite:///{file}"
        migrate(found)
        yield found
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    with postgres.database("template1") as found:
        migrate(found, revision_of(file))
        asyncio.run(copy(file, found))
        migrate(found)
        yield found


def revision_of(file: Path) -> str:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        revision: str = connection.execute("SELECT version_num FROM alembic_version").fetchone()[0]
    return revision


async def copy(file: Path, url: str) -> None:
    """All rows into the same tables on PostgreSQL, as at the store's own revision."""
    source = create_engine(f"sqlite:///{file}")
    tables = MetaData()
    tables.reflect(source, resolve_fks=False)
    rows = {}
    with source.connect() as connection:
        for table in tables.sorted_tables:
            rows[table.name] = [row._asdict() for row in connection.execute(select(table))]
    source.dispose()
    made = create_async_engine(url)
    async with made.begin() as target:
        there = MetaData()
        await target.run_sync(lambda sync: there.reflect(sync))
        for table in there.sorted_tables:
            await target.execute(table.delete())
            if rows[table.name]:
                await target.execute(insert(table), rows[table.name])
        for name, column in (("events", "position"), ("incarnations", "id"), ("group_changes", "id")):
            await _go_on_numbering(target, name, column)
    await made.dispose()


async def _go_on_numbering(target: AsyncConnection, table: str, column: str) -> None:
    after = f"(SELECT coalesce(max({column}), 0) + 1 FROM {table})"
    await target.execute(text(f"SELECT setval(pg_get_serial_sequence('{table}', '{column}'), {after}, false)"))


NEWEST = "3970f0b"
"""Nothing that was there is changed on purpose in the rows of the store of this release."""


@pytest.mark.long
def test_an_old_store_says_what_it_said(release: Path, old: Archive, url: str, tmp_path: Path) -> None:
    report = asyncio.run(verify_url(url))
    assert report.problems == []
    with serving(tmp_path / "now", environment={**QUIET, "TURNLOG_DATABASE_URL": url}) as stand:
        asker = Asker(stand, old.cursor)
        asker.everything()
    assert [question for question in old.answers if question not in asker.answers] == []
    pairs = ((question, before, asker.answers[question]) for question, before in old.answers.items())
    found = [one for pair in pairs for one in differences(*pair)]
    left, unused = unexpected(found, ALLOWED[release.name.partition(".")[0]])
    assert not left, told(left)
    assert not unused, [rule.why for rule in unused]
    if release.name.startswith(NEWEST):
        assert sum(rows_that_go_on(old.answers, asker.answers)) > 100
    assert asyncio.run(verify_url(url)).problems == []


def rows_that_go_on(before: dict[str, bytes], after: dict[str, bytes]) -> Iterator[int]:
    """How many rows of linear sessions each export has: in the same order, each the old line with new fields behind."""
    for question, answer in before.items():
        if re.match(r"GET /export(\?|$)(?!.*(shape|format)=(?!turnlog|ndjson))", question):
            lines, now = answer.splitlines(), after[question].splitlines()
            assert len(lines) == len(now), question
            assert all(new.startswith(old.removesuffix(b"}")) for old, new in zip(lines, now, strict=True)), question
            yield len(lines)


ROW = {"session_id": "s", "segment": 0, "tokens": [1, 2], "reward": 0.5}


@pytest.mark.parametrize(
    ("after", "paths"),
    [
        ([ROW], []),
        ([{**ROW, "tokens": [1, 3]}], ["s,0/tokens/1"]),
        ([{**ROW, "tokens": [1]}], ["s,0/tokens/1"]),
        ([{**ROW, "reward": 1}], ["s,0/reward"]),
        ([{**ROW, "new": None}], ["s,0/new"]),
        ([{"new": None, **ROW}], ["s,0/new", "s,0/(order)"]),
        ([{name: ROW[name] for name in ("session_id", "segment", "reward", "tokens")}], ["s,0/(order)"]),
        ([{name: ROW[name] for name in ("session_id", "segment", "tokens")}], ["s,0/reward"]),
        ([ROW, {**ROW, "segment": 1}], ["s,1"]),
        ([], ["s,0"]),
    ],
)
def test_every_difference_is_found(after: list[dict[str, Any]], paths: list[str]) -> None:
    answers = [b"200\n" + b"".join(json.dumps(row).encode() + b"\n" for row in rows) for rows in ([ROW], after)]
    found = differences("GET /export", *answers)
    assert [one.path for one in found] == paths
    assert unexpected(found, ()) == (found, [])
    rule = Allowed("new fields", r"GET /export", r".*/new", added)
    left, unused = unexpected(found, [rule])
    assert [one.path for one in left] == [path for path in paths if path != "s,0/new"]
    assert (unused == []) == ("s,0/new" in paths)


def test_a_spelling_of_the_same_rows_and_a_status_are_differences() -> None:
    spelled = differences("GET /export", b'200\n{"reward":1.0}\n', b'200\n{"reward":1.00}\n')
    assert [one.path for one in spelled] == ["bytes"]
    assert differences("GET /x", b"200\n{}", b"404\n{}") == [Difference("GET /x", "status", 200, 404)]


def told(left: list[Difference]) -> str:
    lines = [f"{one.question}: {one.path}: {one.before!r:.80} -> {one.after!r:.80}" for one in left[:50]]
    return "\n".join([f"{len(left)} differences:", *lines])


def test_sessions_of_an_old_store_go_on(old: Archive, url: str, tmp_path: Path) -> None:
    """Each that is open takes a turn on top of its own history."""
    with (
        SimulatorProcess() as engine,
        serving(tmp_path / "now", engine.base_url, environment={**QUIET, "TURNLOG_DATABASE_URL": url}) as stand,
    ):
        for name in ("keyed", "rolled-back", "length-first", "refused", "flat-window", "shaped-all", "tokens-in"):
            go_on(stand, name)
        an_agent_goes_on(stand)
    assert asyncio.run(verify_url(url)).problems == []


def go_on(stand: Stand, name: str) -> None:
    talk = stand.known(name)
    last = talk.state()["records"][-1]
    talk.messages = [*last["request"]["messages"], last["response"]["choices"][0]["message"]]
    [row] = talk.rows()
    talk.say("On")
    now = talk.rows()[0]
    assert now["tokens"][: len(row["tokens"])] == row["tokens"], name
    assert now["logprobs"][: len(row["tokens"])] == row["logprobs"], name


def an_agent_goes_on(stand: Stand) -> None:
    """In its own session, which is in the store already, though agents are branches now."""
    talk = stand.known("harness:explorer")
    last = talk.state()["records"][-1]
    messages = [*last["request"]["messages"], last["response"]["choices"][0]["message"], user("On")]
    reply = stand.http.post("/v1/chat/completions", json={"model": "simulator", "messages": messages}, headers=AGENT)
    assert (reply.status_code, reply.headers["x-turnlog-turn"]) == (200, "2")
    assert [event["parent"] for event in talk.committed()] == [0, 1]
    assert len(stand.known("harness").committed()) == 1
