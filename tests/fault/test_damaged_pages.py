"""Damaged pages of an SQLite file: they are their sessions' business, and the rest is served, exported and copied."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.pages import HOWS, NEEDED, How, Kept, Page, kept, lost, overwrite, pages, primary_key
from integration.reading import CONTAINERS, DOCUMENTS, read
from integration.routing import BOTH
from integration.stand import Stand, error_of, serving, until, user

from app.service.export import Exporter, Wish
from app.store.engine import Database
from fault.test_damage import is_older
from ops.simulator.process import SimulatorProcess
from ops.verify import verify_url

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


def exported(path: Path, **wanted: Any) -> list[Row]:
    """All rows of an export by a server of its own, without what depends on when it was asked."""

    async def run() -> bytes:
        database = Database(f"sqlite+aiosqlite:///{path}")
        await database.open()
        try:
            started = await Exporter(database, "test").start(Wish(explain=True, **wanted), None)
            return b"".join([piece async for piece in started.pieces])
        finally:
            await database.close()

    return read(wanted.get("format", "ndjson"), asyncio.run(run()))


def without_cursor(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "cursor"}


@pytest.fixture(scope="module")
def whole(engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    with serving(folder, engine.base_url, environment=BOTH) as stand:

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


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("replay", [False, True])
def test_six_damaged_pages_are_their_sessions_business(whole: Whole, tmp_path: Path, how: How, replay: bool) -> None:
    rng = random.Random(f"six {how}")
    damaged = Damaged(whole, tmp_path, [page.number for page in six(whole.path, rng)], how, rng)
    lost = damaged.lost_with_replay if replay else damaged.lost
    assert 0 < len(lost) < 40
    expected = whole.with_replay if replay else whole.exported
    left_out = others_are_whole(expected, exported(damaged.path, replay=replay), lost)
    assert left_out == lost or how == "flipped"


@pytest.mark.parametrize("how", ["zeros", "flipped"])
@pytest.mark.parametrize("format", [*CONTAINERS[1:], *DOCUMENTS])
def test_every_format_gives_the_others(whole: Whole, tmp_path: Path, format: str, how: How) -> None:
    """Some look at content that others do not."""
    rng = random.Random(f"six {how}")
    damaged = Damaged(whole, tmp_path, [page.number for page in six(whole.path, rng)], how, rng)
    rows = exported(damaged.path, format=format)
    left_out = {row["session_id"] for row in rows if row.get("excluded") is not None}
    assert {row["session_id"] for row in exported(damaged.path) if "excluded" in row} <= left_out <= damaged.lost
    assert {row["session_id"] for row in rows} == set(whole.session_ids)


def listing(path: Path) -> dict[str, list[Page]]:
    """Pages of what lists and orders sessions, and what leads to their events."""
    key = primary_key(path, "events")
    return {
        "order": pages(path, "ix_events_tx_position"),
        "order's end": pages(path, "ix_events_tx_position")[-1:],
        "heads": pages(path, "sessions"),
        "times": pages(path, "ix_sessions_created_at_session_id"),
        "key": pages(path, key),
        "inner": pages(path, kind="internal"),
        "all": pages(path, "ix_events_tx_position", "sessions", "events", key, "ix_sessions_group_id"),
    }


WHERE = ("order", "order's end", "heads", "times", "key", "inner", "all")


def damaged_list(whole: Whole, folder: Path, where: str, how: How, seed: int) -> Damaged:
    rng = random.Random(f"{where} {how} {seed}")
    there = listing(whole.path)[where]
    chosen = rng.sample(there, min(len(there), 6 if where == "all" else 1))
    return Damaged(whole, folder, [page.number for page in chosen], how, rng)


@pytest.mark.parametrize("how", ["zeros", "random"])
@pytest.mark.parametrize("where", WHERE)
def test_a_damaged_list_is_gone_around(whole: Whole, tmp_path: Path, where: str, how: How) -> None:
    """The order of commits is that of each session's own events; a lost head is what the log says."""
    before = [row["session_id"] for row in exported(whole.path)]
    for seed in range(3):
        damaged = damaged_list(whole, tmp_path, where, how, seed)
        rows = exported(damaged.path)
        assert others_are_whole(whole.exported, rows, damaged.lost) == damaged.lost
        sound = [row["session_id"] for row in rows if row["session_id"] not in damaged.lost]
        assert sound == [name for name in before if name not in damaged.lost]


@pytest.mark.parametrize("where", WHERE)
def test_changed_bytes_in_a_list_give_nothing_wrong_and_are_found(whole: Whole, tmp_path: Path, where: str) -> None:
    """SQLite's pages have no checksums: a key that was changed into another may hide a session without an error."""
    for seed in range(3):
        damaged = damaged_list(whole, tmp_path, where, "flipped", seed)
        rows = [without_cursor(row) for row in exported(damaged.path) if "excluded" not in row]
        for row in rows:
            before = whole.exported[row["session_id"]]
            assert row in before or is_older(row, before[0]), row
        if len(rows) < SESSIONS:
            assert asyncio.run(verify_url(f"sqlite+aiosqlite:///{damaged.path}")).problems


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


@pytest.mark.parametrize("where", ["order", "order's end", "heads", "times", "inner"])
def test_a_server_lives_with_a_damaged_list(whole: Whole, tmp_path: Path, engine: SimulatorProcess, where: str) -> None:
    damaged = damaged_list(whole, tmp_path, where, "random", 0)
    with served(damaged, engine) as stand:
        rows = stand.rows(explain="true")
        assert {row["session_id"] for row in rows if "excluded" in row} == damaged.lost
        listed = stand.http.get("/sessions", params={"limit": 500}).json()["sessions"]
        assert {one["session_id"] for one in listed} >= set(whole.session_ids) - damaged.lost
        for path in ("/ui/api/sessions?limit=200", "/ui/api/overview", "/ui/api/groups", "/metrics"):
            reply = stand.http.get(path)
            assert reply.status_code == 200, (path, reply.text)
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
