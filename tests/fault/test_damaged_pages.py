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
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from helpers.databases import database_at, run_module
from helpers.pages import NEEDED, PAGE_BYTES, How, Kept, Page, kept, lost, overwrite, pages, primary_key, root
from helpers.store import Store, reward
from integration.reading import CONTAINERS, DOCUMENTS, read
from integration.routing import BOTH
from integration.stand import Stand, error_of, serving, user
from sqlalchemy.exc import DBAPIError

from app.errors import AppError, SessionUnreadable, StartupError, StoreDamaged, StoreUnavailable
from app.export.exporter import Exporter
from app.export.query import ExportQuery
from app.sessions.all_events import AllEvents, EventQuery
from app.sessions.log_end import LogEnd
from app.store import sessions
from app.store.database import Database
from app.store.dialect import StorePoints
from app.store.feed import Position, last_places
from app.store.log import Appended
from app.store.sessions import load_events, readable_ids
from ops.simulator.process import SimulatorProcess
from ops.verify import Report, verify_url

pytestmark = pytest.mark.long

T = TypeVar("T")

SESSIONS = 200
ALL = (*NEEDED, "chunks")

Row = dict[str, Any]
TALKATIVE: Row = {"completion_tokens": 900, "tool_calls": False, "experts": {"layers": 4, "top_k": 2}}
"""A reply whose content fills pages of its own."""

BRIEF: Row = {"completion_tokens": 20, "tool_calls": False}


@dataclass(frozen=True)
class Whole:
    """A sound store at rest: what SQLite gives of each session, and what is exported of it."""

    path: Path
    session_ids: list[str]
    rows: Kept
    exported: dict[str, list[Row]]
    with_replay: dict[str, list[Row]]


def looked(path: Path, look: Callable[[Database], Awaitable[T]]) -> T:
    """What is found by a server of its own over the file."""

    async def run() -> T:
        async with database_at(f"sqlite+aiosqlite:///{path}") as database:
            return await look(database)

    return asyncio.run(run())


def exported(path: Path, **wanted: Any) -> list[Row]:
    """All rows of an export."""

    async def run(database: Database) -> bytes:
        started = await Exporter(database, "test").start(ExportQuery(explain=True, **wanted), None)
        return b"".join([piece async for piece in started.pieces])

    return read(wanted.get("format", "ndjson"), looked(path, run))


def all_events(path: Path) -> list[Row]:
    """The lines of `GET /events`."""

    async def run(database: Database) -> bytes:
        lines = await AllEvents(database, LogEnd(database)).start(EventQuery())
        return b"".join([piece async for piece in lines])

    return [json.loads(line) for line in looked(path, run).splitlines()]


def problems(path: Path) -> Report:
    return asyncio.run(verify_url(f"sqlite+aiosqlite:///{path}"))


def without_cursor(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "cursor"}


def filled(folder: Path, engine: str) -> Whole:
    """Made by a server, which has ended since."""
    with serving(folder, engine, environment=BOTH) as stand:

        def fill(number: int) -> str:
            name = f"session-{number:03}"
            talk = stand.talk(session_id=name, group_id=f"g{number // 4}", metadata={"task": number, "text": "m" * 300})
            talk.say(f"Question {number}", sim=TALKATIVE if number % 4 == 0 else BRIEF, temperature=number / 100)
            if number % 2:
                talk.say("And then?", sim=BRIEF)
            stand.http.put(f"/sessions/{name}/reward", json={"reward": number / 200})
            if number % 5:
                stand.http.delete(f"/sessions/{name}")
            return name

        names = sorted(run.result() for run in [stand.meanwhile(fill, number) for number in range(SESSIONS)])
    path = folder / "turnlog.db"
    return Whole(
        path, names, kept(path, names, ALL), by_session(exported(path)), by_session(exported(path, replay=True))
    )


def by_session(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Of a sound store, without what depends on when it was asked."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        assert "excluded" not in row
        found.setdefault(row["session_id"], []).append(without_cursor(row))
    assert len(found) == SESSIONS
    return found


def six(path: Path, rng: random.Random) -> list[Page]:
    """Pages of three tables, leaves and what overflowed them."""
    chosen = [rng.choice(pages(path, name)) for name in ("events", "turns", "blobs", "chunks")]
    return [*chosen, *(rng.choice(pages(path, name, kind="overflow")) for name in ("turns", "chunks"))]


class Damaged:
    """A copy of the whole store with damaged pages, and which sessions those took something of."""

    def __init__(self, whole: Whole, folder: Path, numbers: Iterable[int], how: How, rng: random.Random) -> None:
        self.path = folder / "turnlog.db"
        shutil.copyfile(whole.path, self.path)
        overwrite(self.path, numbers, how, rng)
        after = kept(self.path, whole.session_ids, ALL)
        self.lost = lost(whole.rows, after, NEEDED)
        self.lost_with_replay = lost(whole.rows, after, ALL)


def others_are_whole(expected: dict[str, list[Row]], rows: list[Row], lost: set[str]) -> set[str]:
    """Each session has a row or the reason why not, the sound ones what they had; returns those that have none.

    Of one that a flipped byte hit there may be the truth of before its last events, as an index has lost those.
    """
    excluded = {row["session_id"]: row["excluded"] for row in rows if row.get("excluded") is not None}
    given = [row for row in rows if row.get("excluded") is None]
    assert sorted({*excluded, *(row["session_id"] for row in given)}) == sorted(expected)
    assert set(excluded) <= lost
    assert all(reason.startswith("unreadable: ") for reason in excluded.values()), excluded
    for row in map(without_cursor, given):
        before = expected[row["session_id"]]
        assert row in before or (row["session_id"] in lost and is_older(row, before[0])), row
    return set(excluded)


def listing(path: Path) -> dict[str, list[Page]]:
    """Pages of what lists and orders sessions, and what leads to their events."""
    key = primary_key(path, "events")
    return {
        "order": pages(path, "ix_events_tx_position"),
        "heads": pages(path, "sessions"),
        "key": pages(path, key),
        "all": pages(path, "ix_events_tx_position", "sessions", "events", key, "ix_sessions_group_id"),
    }


WHERE = ("order", "heads", "key", "all")


def damaged_list(whole: Whole, folder: Path, where: str, how: How) -> Damaged:
    rng = random.Random(f"{where} {how} 0")
    there = listing(whole.path)[where]
    chosen = rng.sample(there, min(len(there), 6 if where == "all" else 1))
    return Damaged(whole, folder, [page.number for page in chosen], how, rng)


def is_older(row: Row, now: Row) -> bool:
    """Is it the session's row, or what it was before its last events, which an index may have lost?"""
    begins = [
        row[name] == now[name][: len(row[name])] for name in ("tokens", "logprobs", "loss_mask", "turns", "messages")
    ]
    return all(begins) and row["reward"] in (now["reward"], None) and row["metadata"] == now["metadata"]


def found_otherwise(path: Path) -> bool:
    """Does verify find it, or SQLite's own check?"""
    try:
        with closing(sqlite3.connect(path)) as database:
            sound = database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return bool(problems(path).problems) or not sound
    except (AppError, StartupError, DBAPIError, sqlite3.Error):
        return True


@pytest.fixture(scope="module")
def whole(engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A sound SQLite store at rest."""
    return filled(tmp_path_factory.mktemp("whole"), engine.base_url)


def test_every_export_gives_the_others_and_verify_names_what_is_damaged(whole: Whole, tmp_path: Path) -> None:
    """Some formats look at content that others do not; replay payloads have pages of their own."""
    rng = random.Random("six zeros")
    damaged = Damaged(whole, tmp_path, [page.number for page in six(whole.path, rng)], "zeros", rng)
    assert 0 < len(damaged.lost) < len(damaged.lost_with_replay) < 40
    assert others_are_whole(whole.exported, exported(damaged.path), damaged.lost) == damaged.lost
    replayed = exported(damaged.path, replay=True)
    assert others_are_whole(whole.with_replay, replayed, damaged.lost_with_replay) == damaged.lost_with_replay
    for format in (*CONTAINERS[1:], *DOCUMENTS):
        rows = exported(damaged.path, format=format)
        assert {row["session_id"] for row in rows if row.get("excluded") is not None} == damaged.lost, format
        assert {row["session_id"] for row in rows} == set(whole.session_ids)
    report, url = problems(damaged.path), f"sqlite+aiosqlite:///{damaged.path}"
    assert report.sessions == len(whole.session_ids)
    # SQLite reads zeros in the last page of a content: its session is then no unreadable one, but a problem.
    assert set(report.unreadable) <= damaged.lost_with_replay <= {problem.session_id for problem in report.problems}
    assert {"events", "turns", "blobs", "chunks"} == set(report.damaged_tables)
    done = run_module("turnlog.cli", "verify", "--database-url", url, environment=os.environ)
    assert done.returncode == 1, done.stderr
    assert "damaged tables: blobs, chunks, events, turns" in done.stdout
    assert all(name in done.stdout for name in damaged.lost_with_replay)


@pytest.mark.parametrize("where", WHERE)
def test_a_damaged_list_is_gone_around_and_changed_bytes_are_found(whole: Whole, tmp_path: Path, where: str) -> None:
    """The order of commits is that of each session's own events; a session without its head is left out.

    SQLite's pages have no checksums: a key that was changed into another may hide a session without an error. It may
    also lead to another session's event. An event's checksum does not name its session, so a reward may be another
    session's; SQLite's own check finds that.
    """
    damaged = damaged_list(whole, tmp_path, where, "zeros")
    rows = exported(damaged.path)
    assert others_are_whole(whole.exported, rows, damaged.lost) == damaged.lost
    sound = [row["session_id"] for row in rows if row["session_id"] not in damaged.lost]
    assert sound == [name for name in whole.exported if name not in damaged.lost]
    changed = damaged_list(whole, tmp_path, where, "flipped")
    rows = [without_cursor(row) for row in exported(changed.path) if "excluded" not in row]
    for row in rows:
        before = whole.exported[row["session_id"]]
        if row not in before and not is_older(row, before[0]):
            assert is_older({**row, "reward": None}, before[0]), row
            assert found_otherwise(changed.path)
    if len(rows) < SESSIONS:
        assert problems(changed.path).problems


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

    assert looked(path, lambda database: database.read(readable_ids)) == whole.session_ids


@pytest.mark.parametrize("column", ["tx", "position"])
def test_a_place_that_is_no_number_is_its_sessions_business(whole: Whole, tmp_path: Path, column: str) -> None:
    path = Path(shutil.copyfile(whole.path, tmp_path / "turnlog.db"))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"UPDATE events SET {column} = x'00' WHERE session_id = 'session-003' AND seq = 1")
    upto, types = Position(0, 1 << 40), ("SessionCreated", "TurnCommitted")
    read_places = partial(last_places, session_ids=whole.session_ids, upto=upto, types=types)
    places = looked(path, lambda database: database.read(read_places))
    assert set(places) == set(whole.session_ids)
    assert max(places, key=places.__getitem__) == "session-003", "behind all others"


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


def answers_for(stand: Stand, session_id: str) -> list[httpx.Response]:
    """What a client is told that asks for a session, for a turn and for its reward."""
    path = f"/sessions/{session_id}"
    body = {"model": "simulator", "messages": [user("Anew")], "sim": BRIEF}
    return [
        *(stand.http.get(path), stand.http.get(f"{path}/events")),
        *(
            stand.http.post(f"{path}/v1/chat/completions", json=body),
            stand.http.put(f"{path}/reward", json={"reward": 1}),
        ),
    ]


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
    with serving(damaged.path.parent, engine.base_url, environment={**FORGETFUL, **TIDY}) as stand:
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
        told = warnings_of(stand)
        named = [name for name in whole.session_ids if any(f"session {name} cannot be read" in line for line in told)]
        assert gone <= set(named) <= damaged.lost_with_replay
        assert len(told) == len(named), told
        rows = stand.rows(explain="true")
        assert {row["session_id"] for row in rows if "excluded" in row} == damaged.lost
        assert warnings_of(stand) == told, "once a session, however often it is asked for"
        stand.http.close()
        left = stand.server.log_path.read_text()
        assert "unexpected error" not in left
        assert "round was interrupted" not in left


@pytest.mark.parametrize("where", ["order", "heads"])
def test_a_server_lives_with_a_damaged_list_and_hands_out_the_other_groups(
    whole: Whole, tmp_path: Path, engine: SimulatorProcess, where: str
) -> None:
    damaged = damaged_list(whole, tmp_path, where, "random")
    with serving(damaged.path.parent, engine.base_url, environment=FORGETFUL) as stand:
        rows = stand.rows(explain="true")
        assert {row["session_id"] for row in rows if "excluded" in row} == damaged.lost
        lists = ("/sessions?limit=500", "/ui/api/sessions?limit=200", "/ui/api/overview", "/groups")
        replies = {path: stand.http.get(path) for path in lists}
        assert all(reply.is_success or error_of(reply) == (500, "store_damaged") for reply in replies.values()), replies
        assert any(reply.is_error for reply in replies.values()) or where != "heads"
        assert stand.http.get("/metrics").is_success
        pages_of = walked(stand)
        assert [row["session_id"] for row in pages_of] == [row["session_id"] for row in rows]
        for name in set(whole.session_ids) - damaged.lost:
            stand.http.delete(f"/sessions/{name}")
        reply = stand.http.get("/export/groups", params={"consumer": "trainer", "size": 60, "lease_s": 60})
        assert reply.status_code == 200, reply.text
        lines = [json.loads(line) for line in reply.content.splitlines()]
        assert len({row["session_id"] for line in lines for row in line["rows"]}) > SESSIONS / 2
        left_out = {one["session_id"]: one["reason"] for line in lines for one in line["excluded"]}
        assert all(reason.startswith("unreadable: ") for reason in left_out.values()), left_out
        assert left_out.keys() <= damaged.lost
        assert "unexpected error" not in stand.server.log_path.read_text()


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
    database = Database(f"sqlite+aiosqlite:///{damaged.path}", points=StorePoints())
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


@pytest.mark.anyio
async def test_a_store_that_cannot_be_read_at_all_is_no_sessions_damage(whole: Whole, tmp_path: Path) -> None:
    """What every request needs is gone: asking again may help, once somebody has mended it."""
    damaged = Damaged(
        whole, tmp_path, [root(whole.path, "store_meta"), root(whole.path, "events")], "zeros", random.Random(1)
    )
    database = Database(f"sqlite+aiosqlite:///{damaged.path}", points=StorePoints())
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
def test_the_documented_repair_keeps_the_other_sessions(whole: Whole, tmp_path: Path) -> None:
    """sqlite3's `.dump`, then heads and claims from the logs."""
    assert DUMP in Path("docs/operations.md").read_text()
    damaged = damaged_list(whole, tmp_path, "heads", "zeros")
    subprocess.run(DUMP, check=True, shell=True, cwd=tmp_path)
    url = f"sqlite+aiosqlite:///{tmp_path / 'repaired.db'}"
    fix = [sys.executable, "-m", "turnlog.cli", "replay", "--heads", "--fix"]
    subprocess.run(fix, env={**os.environ, "TURNLOG_DATABASE_URL": url}, check=False)
    rows = {row["session_id"]: without_cursor(row) for row in exported(tmp_path / "repaired.db")}
    assert {name for name, row in rows.items() if "excluded" not in row} >= set(whole.session_ids) - damaged.lost
    assert all(row in whole.exported[name] for name, row in rows.items() if "excluded" not in row)
