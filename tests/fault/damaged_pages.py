"""An SQLite store of many sessions, copies of it with damaged pages, and what must be exported of those."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.databases import database_at
from helpers.pages import NEEDED, How, Kept, Page, kept, lost, overwrite, pages, primary_key
from integration.reading import read
from integration.routing import BOTH
from integration.stand import serving

from app.export.exporter import Exporter
from app.export.query import ExportQuery
from fault.test_damage import is_older

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
        async with database_at(f"sqlite+aiosqlite:///{path}") as database:
            started = await Exporter(database, "test").start(ExportQuery(explain=True, **wanted), None)
            return b"".join([piece async for piece in started.pieces])

    return read(wanted.get("format", "ndjson"), asyncio.run(run()))


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
        "order's end": pages(path, "ix_events_tx_position")[-1:],
        "heads": pages(path, "sessions"),
        "times": pages(path, "ix_sessions_created_at_session_id"),
        "key": pages(path, key),
        "inner": pages(path, kind="internal"),
        "all": pages(path, "ix_events_tx_position", "sessions", "events", key, "ix_sessions_group_id"),
    }


RARE = tuple(pytest.param(where, marks=pytest.mark.untimed) for where in ("order's end", "times", "inner"))
WHERE = ("order", "heads", "key", "all", *RARE)


def damaged_list(whole: Whole, folder: Path, where: str, how: How) -> Damaged:
    rng = random.Random(f"{where} {how} 0")
    there = listing(whole.path)[where]
    chosen = rng.sample(there, min(len(there), 6 if where == "all" else 1))
    return Damaged(whole, folder, [page.number for page in chosen], how, rng)
