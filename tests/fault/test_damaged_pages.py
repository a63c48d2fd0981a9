"""Damaged pages of an SQLite file: they are their sessions' business, and the rest is served and exported."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from helpers.databases import database_at, run_module
from helpers.pages import HOWS, PAGE_BYTES, How, kept, overwrite, pages, primary_key, root
from helpers.store import Store, reward
from integration.reading import CONTAINERS, DOCUMENTS, read
from integration.routing import BOTH
from integration.stand import Stand, error_of, serving, until, user
from sqlalchemy import Connection

from app.errors import SessionUnreadable, StoreDamaged, StoreUnavailable
from app.sessions.all_events import AllEvents, EventQuery
from app.sessions.log_end import LogEnd
from app.store import sessions
from app.store.engine import Database
from app.store.feed import Position, last_places
from app.store.log import Appended
from app.store.sessions import load_events, readable_ids
from fault.damaged_pages import (
    BRIEF,
    RARE,
    SESSIONS,
    WHERE,
    Damaged,
    Row,
    Whole,
    damaged_list,
    exported,
    others_are_whole,
    six,
    without_cursor,
)
from fault.test_damage import found_otherwise, is_older
from ops.simulator.process import SimulatorProcess
from ops.verify import verify_url

pytestmark = pytest.mark.long

T = TypeVar("T")


@pytest.mark.parametrize("how", [HOWS[0], *(pytest.param(how, marks=pytest.mark.untimed) for how in HOWS[1:])])
@pytest.mark.parametrize("replay", [False, True])
def test_six_damaged_pages_are_their_sessions_business(whole: Whole, tmp_path: Path, how: How, replay: bool) -> None:
    rng = random.Random(f"six {how}")
    damaged = Damaged(whole, tmp_path, [page.number for page in six(whole.path, rng)], how, rng)
    lost = damaged.lost_with_replay if replay else damaged.lost
    assert 0 < len(lost) < 40
    expected = whole.with_replay if replay else whole.exported
    left_out = others_are_whole(expected, exported(damaged.path, replay=replay), lost)
    assert left_out == lost or how == "flipped"


def test_rollouts_are_counted_without_the_list_of_their_sessions(whole: Whole, tmp_path: Path) -> None:
    path = Path(shutil.copy(whole.path, tmp_path))
    roots = {name: whole.session_ids[at - at % 4] for at, name in enumerate(whole.session_ids) if at % 4}
    with closing(sqlite3.connect(path)) as connection:
        connection.executemany(
            "UPDATE sessions SET root_id = ? WHERE session_id = ?", [(b, a) for a, b in roots.items()]
        )
        connection.commit()
    before = exported(path)
    assert {row["rollout_rows"] for row in before} == {4}
    overwrite(path, [page.number for page in pages(path, "ix_sessions_root_id")], "zeros", random.Random(0))
    assert [without_cursor(row) for row in exported(path)] == [without_cursor(row) for row in before]


def looked(path: Path, read: Callable[[Connection], T]) -> T:
    """What `read` finds in the file."""

    async def look() -> T:
        async with database_at(f"sqlite+aiosqlite:///{path}") as database:
            return await database.read(read)

    return asyncio.run(look())


@pytest.fixture(scope="module")
def hit(request: pytest.FixtureRequest, whole: Whole, tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    rng = random.Random(f"six {request.param}")
    numbers = [page.number for page in six(whole.path, rng)]
    return Damaged(whole, tmp_path_factory.mktemp("six"), numbers, request.param, rng)


@pytest.mark.parametrize("hit", ["zeros", pytest.param("flipped", marks=pytest.mark.untimed)], indirect=True)
@pytest.mark.parametrize("format", [*CONTAINERS[1:], *DOCUMENTS])
def test_every_format_gives_the_others(whole: Whole, hit: Damaged, format: str) -> None:
    """Some look at content that others do not."""
    rows = exported(hit.path, format=format)
    left_out = {row["session_id"] for row in rows if row.get("excluded") is not None}
    assert {row["session_id"] for row in exported(hit.path) if "excluded" in row} <= left_out <= hit.lost
    assert {row["session_id"] for row in rows} == set(whole.session_ids)


@pytest.mark.parametrize("how", ["zeros", pytest.param("random", marks=pytest.mark.untimed)])
@pytest.mark.parametrize("where", WHERE)
def test_a_damaged_list_is_gone_around(whole: Whole, tmp_path: Path, where: str, how: How) -> None:
    """The order of commits is that of each session's own events; a session without its head is left out."""
    damaged = damaged_list(whole, tmp_path, where, how)
    rows = exported(damaged.path)
    assert others_are_whole(whole.exported, rows, damaged.lost) == damaged.lost
    sound = [row["session_id"] for row in rows if row["session_id"] not in damaged.lost]
    assert sound == [name for name in whole.exported if name not in damaged.lost]


@pytest.mark.parametrize("where", WHERE)
def test_changed_bytes_in_a_list_give_nothing_wrong_and_are_found(whole: Whole, tmp_path: Path, where: str) -> None:
    """SQLite's pages have no checksums: a key that was changed into another may hide a session without an error.

    It may also lead to another session's event. An event's checksum does not name its session, so a reward may be
    another session's; SQLite's own check finds that.
    """
    damaged = damaged_list(whole, tmp_path, where, "flipped")
    rows = [without_cursor(row) for row in exported(damaged.path) if "excluded" not in row]
    for row in rows:
        before = whole.exported[row["session_id"]]
        if row not in before and not is_older(row, before[0]):
            assert is_older({**row, "reward": None}, before[0]), row
            assert found_otherwise(damaged.path)
    if len(rows) < SESSIONS:
        assert asyncio.run(verify_url(f"sqlite+aiosqlite:///{damaged.path}")).problems


def test_verify_goes_on_and_names_sessions_and_tables(whole: Whole, tmp_path: Path) -> None:
    rng = random.Random("verify")
    damaged = Damaged(whole, tmp_path, [page.number for page in six(whole.path, rng)], "zeros", rng)
    url = f"sqlite+aiosqlite:///{damaged.path}"
    report = asyncio.run(verify_url(url))
    assert report.sessions == len(whole.session_ids)
    # SQLite reads zeros in the last page of a content: its session is then no unreadable one, but a problem.
    assert set(report.unreadable) <= damaged.lost_with_replay <= {problem.session_id for problem in report.problems}
    assert {"events", "turns", "blobs", "chunks"} == set(report.damaged_tables)
    done = run_module("turnlog.cli", "verify", "--database-url", url, environment=os.environ)
    assert done.returncode == 1, done.stderr
    assert "damaged tables: blobs, chunks, events, turns" in done.stdout
    assert all(name in done.stdout for name in damaged.lost_with_replay)


def test_a_key_that_leads_backwards_ends_no_walk_in_a_circle(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed key may be smaller than those before it: what goes on behind it would begin again."""
    monkeypatch.setattr(sessions, "WALKED", 4)
    content = bytearray(whole.path.read_bytes())
    for page in pages(whole.path, primary_key(whole.path, "events")):
        place = slice((page.number - 1) * PAGE_BYTES, page.number * PAGE_BYTES)
        content[place] = content[place].replace(b"session-103", b"session-003")  # both end a page
    path = tmp_path / "turnlog.db"
    path.write_bytes(content)

    assert looked(path, readable_ids) == whole.session_ids


@pytest.mark.parametrize("column", ["tx", "position"])
def test_a_place_that_is_no_number_is_its_sessions_business(whole: Whole, tmp_path: Path, column: str) -> None:
    path = Path(shutil.copyfile(whole.path, tmp_path / "turnlog.db"))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"UPDATE events SET {column} = x'00' WHERE session_id = 'session-003' AND seq = 1")
    upto, types = Position(0, 1 << 40), ("SessionCreated", "TurnCommitted")
    places = looked(path, lambda connection: last_places(connection, whole.session_ids, upto, types))
    assert set(places) == set(whole.session_ids)
    assert max(places, key=places.__getitem__) == "session-003", "behind all others"


def all_events(path: Path) -> list[Row]:
    """The lines of `GET /events`, without the epoch in their positions."""

    async def run() -> bytes:
        async with database_at(f"sqlite+aiosqlite:///{path}") as database:
            lines = await AllEvents(database, LogEnd(database)).start(EventQuery())
            return b"".join([piece async for piece in lines])

    return [json.loads(line) for line in asyncio.run(run()).splitlines()]


@pytest.mark.parametrize("where", ["events", "ix_events_tx_position"])
def test_the_events_of_all_sessions_are_given_around_a_damaged_page(whole: Whole, tmp_path: Path, where: str) -> None:
    """Each event that cannot be read is a line that says so, at its place."""
    rng = random.Random(f"all events {where}")
    page = rng.choice(pages(whole.path, where)[:-1])
    damaged = Damaged(whole, tmp_path, [page.number], "zeros", rng)
    before, after = all_events(whole.path), all_events(damaged.path)
    lost = {at for at, line in enumerate(after) if "error" in line}
    assert 0 < len(lost) < len(before) / 2
    assert [line for at, line in enumerate(after) if at not in lost] == [
        line for at, line in enumerate(before) if at not in lost
    ]
    assert len(after) == len(before)
    if where == "events":
        assert {before[at]["session_id"] for at in lost} <= unreadable_in_full(whole, damaged)


FORGETFUL = {**BOTH, "TURNLOG_CACHE_BYTES": "0"}
"""A server that reads what it is asked for."""

TIDY = {"TURNLOG_CLOSED_REPLAY_TTL_S": "0.4", "TURNLOG_IDLE_CLOSE_S": "600"}
"""Its janitor looks at every session twice a second."""


def warnings_of(stand: Stand) -> list[str]:
    """The log's lines that something cannot be read."""
    lines = stand.server.log_path.read_text().splitlines()
    return [line for line in lines if "cannot be read" in line or "damaged" in line]


@contextmanager
def served(damaged: Damaged, engine: SimulatorProcess, **environment: str) -> Iterator[Stand]:
    with serving(damaged.path.parent, engine.base_url, environment={**FORGETFUL, **environment}) as stand:
        yield stand


def turn(stand: Stand, session_id: str) -> httpx.Response:
    """A turn that goes on where nobody knows how the session went: it may not fit, but it is not in the way."""
    body = {"model": "simulator", "messages": [user("Anew")], "sim": BRIEF}
    return stand.http.post(f"/sessions/{session_id}/v1/chat/completions", json=body)


def answers_for(stand: Stand, session_id: str) -> list[httpx.Response]:
    """What a client is told that asks for a session, for its turn and for its reward."""
    path = f"/sessions/{session_id}"
    reward = stand.http.put(f"{path}/reward", json={"reward": 1.0})
    return [stand.http.get(path), stand.http.get(f"{path}/events"), turn(stand, session_id), reward]


def unreadable_in_full(whole: Whole, damaged: Damaged) -> set[str]:
    """The sessions whose log has lost an event: nothing can be asked of them."""
    after = kept(damaged.path, whole.session_ids, ["events"])
    return {session_id for (_, session_id), rows in after.items() if rows is None}


def test_a_server_answers_for_the_damaged_sessions_and_serves_the_others(
    whole: Whole, tmp_path: Path, engine: SimulatorProcess
) -> None:
    rng = random.Random("served")
    key = primary_key(whole.path, "events")
    # Far from the pages to which new rows go: those are everybody's.
    old = [pages(whole.path, name)[:-4] for name in ("events", key, "turns", "turns", "blobs", "chunks")]
    damaged = Damaged(whole, tmp_path, [rng.choice(some).number for some in old], "zeros", rng)
    gone = unreadable_in_full(whole, damaged)
    assert gone
    with served(damaged, engine, **TIDY) as stand:
        for session_id in sorted(gone)[:4]:
            for answer in answers_for(stand, session_id):
                assert error_of(answer) == (500, "session_unreadable"), answer.text
                assert answer.headers["x-should-retry"] == "false"
                assert "retry-after" not in answer.headers
        for format in (*CONTAINERS, *DOCUMENTS):
            reply = stand.http.get("/export", params={"format": format, "explain": "true"})
            assert reply.status_code == 200
            rows = read(format, reply.content)
            assert {row["session_id"] for row in rows if row.get("excluded") is not None} == damaged.lost
        assert stand.http.get("/sessions", params={"limit": 500}).status_code == 200
        fresh = stand.talk(session_id="zz-fresh")
        fresh.say("Hello", sim=BRIEF)
        fresh.say("Still here?", sim=BRIEF)
        until(lambda: len(stand.server.log_path.read_text()) > 0)
        told = warnings_of(stand)
        named = [name for name in whole.session_ids if any(f"session {name} cannot be read" in line for line in told)]
        assert gone <= set(named) <= damaged.lost_with_replay
        assert len(told) == len(named), told
        rows = stand.rows(explain="true")
        assert {row["session_id"] for row in rows if "excluded" in row} == damaged.lost
        assert warnings_of(stand) == told, "once a session, however often it is asked for"
        stand.http.close()
        left = stand.server.log_path.read_text()
        assert "unexpected fault" not in left
        assert "round was cut short" not in left


@pytest.mark.parametrize("where", ["order", "heads", *RARE])
def test_a_server_lives_with_a_damaged_list(whole: Whole, tmp_path: Path, engine: SimulatorProcess, where: str) -> None:
    damaged = damaged_list(whole, tmp_path, where, "random")
    with served(damaged, engine) as stand:
        rows = stand.rows(explain="true")
        assert {row["session_id"] for row in rows if "excluded" in row} == damaged.lost
        lists = ("/sessions?limit=500", "/ui/api/sessions?limit=200", "/ui/api/overview", "/groups")
        replies = {path: stand.http.get(path) for path in lists}
        assert all(reply.is_success or error_of(reply) == (500, "store_damaged") for reply in replies.values()), replies
        assert any(reply.is_error for reply in replies.values()) or where != "heads"
        assert stand.http.get("/metrics").is_success
        pages_of = walked(stand)
        assert [row["session_id"] for row in pages_of] == [row["session_id"] for row in rows]
        assert "unexpected fault" not in stand.server.log_path.read_text()


def walked(stand: Stand) -> list[Row]:
    """The same export a few rows at a time, each page by the cursor of the last row before it."""
    found: list[Row] = []
    parameters: dict[str, str] = {"explain": "true", "limit": "40"}
    while page := stand.rows(**parameters):
        found += page
        parameters["cursor"] = page[-1]["cursor"]
    return found


@pytest.mark.anyio
async def test_a_write_that_meets_a_damaged_page_leaves_its_neighbours_alone(whole: Whole, tmp_path: Path) -> None:
    """All in one transaction: the head of one session is lost."""
    damaged = damaged_list(whole, tmp_path, "heads", "zeros")
    database = Database(f"sqlite+aiosqlite:///{damaged.path}")
    await database.open()
    async with Store.over(database) as store:
        writes = [store.submit(reward(name, 0.5)) for name in whole.session_ids]
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        refused = {
            name for name, one in zip(whole.session_ids, outcomes, strict=True) if isinstance(one, SessionUnreadable)
        }
        written = [one for one in outcomes if isinstance(one, Appended)]
        assert 0 < len(refused) < 60
        assert len(written) == SESSIONS - len(refused)
        assert await store.create("zz-fresh")
    await database.close()


@pytest.mark.parametrize("where", ["heads", pytest.param("key", marks=pytest.mark.untimed)])
def test_the_feed_hands_out_the_other_groups(
    whole: Whole, tmp_path: Path, engine: SimulatorProcess, where: str
) -> None:
    damaged = damaged_list(whole, tmp_path, where, "zeros")
    with served(damaged, engine) as stand:
        for name in whole.session_ids:
            if name not in damaged.lost:
                stand.http.delete(f"/sessions/{name}")
        reply = stand.http.get("/export/groups", params={"consumer": "trainer", "size": 60, "lease_s": 60})
        assert reply.status_code == 200, reply.text
        lines = [json.loads(line) for line in reply.text.splitlines()]
        given = {row["session_id"] for line in lines for row in line["rows"]}
        assert len(given) > SESSIONS / 2
        left_out = {one["session_id"]: one["reason"] for line in lines for one in line["excluded"]}
        assert all(reason.startswith("unreadable: ") for reason in left_out.values()), left_out
        assert left_out.keys() <= damaged.lost


@pytest.mark.anyio
async def test_a_store_that_cannot_be_read_at_all_is_no_sessions_damage(whole: Whole, tmp_path: Path) -> None:
    """What every request needs is gone: asking again may help, once somebody has mended it."""
    damaged = Damaged(
        whole, tmp_path, [root(whole.path, "store_meta"), root(whole.path, "events")], "zeros", random.Random(1)
    )
    database = Database(f"sqlite+aiosqlite:///{damaged.path}")
    await database.open()
    with pytest.raises(StoreUnavailable) as refused:
        await database.read(partial(load_events, session_id="session-000"), session_id="session-000")
    assert not isinstance(refused.value, StoreDamaged)
    assert refused.value.headers() == {"retry-after": "2"}
    await database.close()


DUMP = """sqlite3 repaired.db 'PRAGMA auto_vacuum = 2; PRAGMA journal_mode = WAL'
   sqlite3 turnlog.db .dump | sed 's/^ROLLBACK;.*/COMMIT;/' | sqlite3 repaired.db
"""


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="sqlite3's command is not installed")
@pytest.mark.parametrize("where", ["heads", pytest.param("key", marks=pytest.mark.untimed)])
def test_the_runbooks_repair_keeps_the_other_sessions(whole: Whole, tmp_path: Path, where: str) -> None:
    """sqlite3's `.dump`, then heads and claims from the logs."""
    assert DUMP in Path("docs/runbook.md").read_text()
    damaged = damaged_list(whole, tmp_path, where, "zeros")
    subprocess.run(DUMP, check=True, shell=True, cwd=tmp_path)
    url = f"sqlite+aiosqlite:///{tmp_path / 'repaired.db'}"
    fix = [sys.executable, "-m", "turnlog.cli", "replay", "--heads", "--fix"]
    subprocess.run(fix, env={**os.environ, "TURNLOG_DATABASE_URL": url}, check=False)
    rows = {row["session_id"]: without_cursor(row) for row in exported(tmp_path / "repaired.db")}
    assert {name for name, row in rows.items() if "excluded" not in row} >= set(whole.session_ids) - damaged.lost
    assert all(row in whole.exported[name] for name, row in rows.items() if "excluded" not in row)
