"""The list of sessions against a plain Python one: every order, every filter, page by page."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from typing import Any, get_args

import pytest
from helpers.log import BODY, created
from helpers.store import Store, engines_at, reward
from sqlalchemy import insert

from app.domain.events import AnnotationWritten
from app.domain.fleet import EngineListed
from app.errors import InvalidRequest
from app.features.annotations.annotations import WriteAnnotation
from app.features.page import overview as page_reads
from app.sessions.session_list import SessionList, SessionQuery, Sort
from app.store import sessions as session_reads
from app.store.log_sessions import Create
from app.store.schema import sessions
from app.store.sessions import HeadFilter, count_heads
from turnlog.replies import ListedSession
from workers.reply import VersionSpan

pytestmark = pytest.mark.anyio

NOW = 1000.0
ENGINES = ("http://one", "http://two")
NEWEST = 9


class Filled:
    """A store of some sessions of every kind, and the list of them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.held: dict[str, bool] = {}
        self.list = SessionList(store.database, lambda: self.held, engines_at(str(NEWEST), "name", None), lambda: NOW)
        self._dice = random.Random(7)

    async def fill(self, count: int = 24) -> None:
        for number in range(count):
            name = f"{'ab_'[number % 3]}-{number}"
            # Two are created at the same moment: the id decides between them.
            event = created(group_id=self._dice.choice((None, "g", "h")), attempt=self._dice.choice((None, 1)))
            create = Create(name, float(number // 2), event, None)
            await self.store.submit(create)
            for _ in range(self._dice.choice((0, 1, 1, 2))):
                version = self._dice.choice(("3", "8", "step"))
                spans = (VersionSpan(version, 0, 2),)
                engine = self._dice.choice(ENGINES)
                await self.store.take_turn(name, weight_versions=spans, engine=engine, tool_errors=number % 4)
            if number % 5 == 0:
                await self._claim(name, ends=True)
            if self._dice.random() < 0.5:
                await self.store.submit(reward(name, self._dice.choice((0.0, 0.5, 1.0))))
            if number % 3:
                said = AnnotationWritten("verdict" if number % 2 else "verdict_2", None, True, size=4)
                await self.store.submit(WriteAnnotation(name, float(number), said))
            await self._end(name)

    async def _end(self, name: str) -> None:
        match self._dice.choice(("open", "open", "claimed", "closed", "erased")):
            case "claimed":
                await self._claim(name, ends=False)
            case "closed":
                await self.store.close(name)
            case "erased":
                await self.store.close(name)
                await self.store.erase(name)

    async def _claim(self, name: str, *, ends: bool) -> None:
        session = await self.store.session(name)
        assert session is not None
        turn, parent = session.last_turn + 1, session.path[-1] if session.path else 0
        claimed = await self.store.claim(name, session.version, turn=turn, parent=parent)
        if ends:
            await self.store.release(name, claimed.events[0].seq, turn=turn)

    async def every(self, limit: int = 5, **asked: Any) -> list[ListedSession]:
        """All pages; each has the same total."""
        found: list[ListedSession] = []
        totals: list[int] = []
        cursor = None
        while True:
            page = await self.list.page(SessionQuery(**asked), cursor, limit)
            found += page["sessions"]
            totals.append(page["total"])
            assert page["total_is_exact"]
            cursor = page["next_cursor"]
            if cursor is None:
                assert totals == [len(found)] * len(totals)
                return found
            assert len(page["sessions"]) == limit


@pytest.fixture
async def filled(store: Store) -> Filled:
    made = Filled(store)
    await made.fill()
    return made


VALUES: dict[str, Callable[[ListedSession], float | None]] = {
    "created_at": lambda row: row["created_at"],
    "updated_at": lambda row: row["updated_at"],
    "reward": lambda row: row["reward"],
    "turns": lambda row: row["turns"],
    "staleness": lambda row: None if row["staleness"] is None else -row["staleness"],
    "engine_errors": lambda row: row["engine_errors"],
    "tool_errors": lambda row: row["tool_errors"],
    "running_since": lambda row: row["running_since"],
}
"""What each order goes by, descending; the ids follow the stored value, which for staleness runs the other way."""


def expected(rows: list[ListedSession], sort: str, newest_first: bool) -> list[str]:
    descending = newest_first != (sort == "staleness")
    value = VALUES[sort]
    known = [(found, row["session_id"]) for row in rows if (found := value(row)) is not None]
    unknown = sorted((row["session_id"] for row in rows if value(row) is None), reverse=descending)
    return [name for _, name in sorted(known, reverse=descending)] + unknown


async def test_every_order_both_ways_is_that_of_a_plain_sort(filled: Filled) -> None:
    rows = await filled.every()
    assert len(rows) == 24
    assert {row["state"] for row in rows} == {"idle", "running", "closed", "erased"}
    claimed = [row for row in rows if row["running_since"] is not None]
    for sort in get_args(Sort):
        for newest_first in (True, False):
            found = await filled.every(sort=sort, order="desc" if newest_first else "asc")
            of = claimed if sort == "running_since" else rows
            assert [row["session_id"] for row in found] == expected(of, sort, newest_first), (sort, newest_first)
    assert [row["staleness"] for row in await filled.every(sort="staleness")][:2] == [6, 6]


def has_verdict(row: ListedSession) -> bool:
    """As `Filled.fill` gives it; an erasure takes it away."""
    number = int(row["session_id"].rpartition("-")[2])
    return number % 3 > 0 and number % 2 == 1 and row["state"] != "erased"


FILTERS: list[tuple[dict[str, Any], Callable[[ListedSession], bool]]] = [
    ({"state": "open"}, lambda row: row["state"] in ("idle", "running", "paused")),
    ({"state": "idle"}, lambda row: row["state"] == "idle"),
    ({"state": "running"}, lambda row: row["state"] == "running"),
    ({"state": "paused"}, lambda row: row["state"] == "paused"),
    ({"state": "closed"}, lambda row: row["state"] == "closed"),
    ({"state": "erased"}, lambda row: row["state"] == "erased"),
    ({"group_id": "g"}, lambda row: row["group_id"] == "g"),
    ({"engine": ENGINES[0]}, lambda row: row["engine"] == ENGINES[0]),
    ({"min_reward": 0.5}, lambda row: row["reward"] is not None and row["reward"] >= 0.5),
    ({"max_reward": 0.0}, lambda row: row["reward"] == 0.0),
    ({"unrewarded": True}, lambda row: row["reward"] is None),
    ({"annotated": "verdict"}, has_verdict),
    ({"unannotated": "verdict"}, lambda row: row["state"] != "erased" and not has_verdict(row)),
    ({"min_engine_errors": 1}, lambda row: row["engine_errors"] >= 1),
    ({"min_tool_errors": 3}, lambda row: row["tool_errors"] >= 3),
    ({"min_staleness": 2}, lambda row: row["staleness"] is not None and row["staleness"] >= 2),
    ({"stuck_s": 5.0}, lambda row: row["running_since"] is not None),
    ({"stuck_s": NOW}, lambda row: False),
    ({"q": "a-"}, lambda row: row["session_id"].startswith("a-")),
    ({"q": "_"}, lambda row: row["session_id"].startswith("_")),
    ({"q": "B"}, lambda row: False),
    ({"state": "running", "group_id": "h"}, lambda row: row["state"] == "running" and row["group_id"] == "h"),
    ({"state": "paused", "stuck_s": 5.0}, lambda row: row["state"] == "paused" and row["running_since"] is not None),
]


async def test_every_filter_gives_what_it_says_and_counts_it(filled: Filled) -> None:
    rows = await filled.every()
    idle = next(row["session_id"] for row in rows if row["state"] == "idle")
    claimed = next(row["session_id"] for row in rows if row["state"] == "running")
    filled.held = {idle: False, claimed: True}
    rows = await filled.every()
    assert {row["session_id"] for row in rows if row["state"] == "paused"} == {idle, claimed}
    for asked, fits in FILTERS:
        for sort in ("created_at", "reward"):
            found = await filled.every(limit=3, sort=sort, **asked)
            assert [row["session_id"] for row in found] == expected([row for row in rows if fits(row)], sort, True), (
                asked
            )


async def test_a_cursor_of_another_list_is_refused(filled: Filled) -> None:
    page = await filled.list.page(SessionQuery(), None, 5)
    for asked, cursor in (
        (SessionQuery(sort="turns"), page["next_cursor"]),
        (SessionQuery(run="other"), page["next_cursor"]),
        (SessionQuery(), "x"),
        (SessionQuery(), "W10"),
        (SessionQuery(), "é"),
    ):
        with pytest.raises(InvalidRequest):
            await filled.list.page(asked, cursor, 5)


async def test_a_made_up_cursor_never_reaches_the_database(filled: Filled) -> None:
    for place in ((2**63, "a"), (-(2**63) - 1, "a"), (10**30, "a"), (1.0, "a\0"), (None, "\0"), (True, "a")):
        cursor = base64.urlsafe_b64encode(json.dumps(("created_at", True, *place, "")).encode()).decode()
        with pytest.raises(InvalidRequest):
            await filled.list.page(SessionQuery(), cursor, 5)


async def test_more_than_are_counted_are_said_to_be_more(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_reads, "COUNTED", 3)
    row = {"version": 1, "status": "open", "open_turns": 0, "turns": 0, "updated_at": 1.0, "run": "default"}
    row["body_hash"] = BODY
    rows = [{**row, "session_id": str(number), "created_at": float(number)} for number in range(5)]
    await store.database.write(lambda tx: tx.insert(insert(sessions), rows), durable=False)
    counted = await store.database.read(lambda connection: count_heads(connection, HeadFilter()))
    assert counted == 4


async def test_the_counts_are_those_of_the_list(filled: Filled) -> None:
    rows = await filled.every()
    counts = await filled.store.database.read(lambda connection: page_reads.counts(connection, since=2.5))
    by_state = [row["state"] for row in rows]
    assert counts.open == by_state.count("idle") + by_state.count("running")
    assert (counts.closed, counts.erased) == (by_state.count("closed"), by_state.count("erased"))
    changed = [row for row in rows if row["state"] in ("idle", "running") and row["turns"] and row["updated_at"] >= 2.5]
    assert counts.changed == len(changed) > 0
    running, newly_active = await filled.store.database.read(lambda c: page_reads.claims(c, since=2.0))
    assert running == by_state.count("running")
    new = [row for row in rows if row["state"] == "running" and (row["updated_at"] < 2.0 or not row["turns"])]
    assert newly_active == len(new)


async def test_staleness_counts_from_the_newest_version_of_the_run(store: Store) -> None:
    """Of its sessions, and of the engines that serve it: here one serves `own` alone."""
    engines = engines_at("9", "20")
    urls = list(engines.members)
    engines.serve([EngineListed(urls[0]), EngineListed(urls[1], run="own")], {"own"})
    listed = SessionList(store.database, dict, engines, lambda: NOW)
    for at, (name, run, version) in enumerate(
        (("a", "a", "900"), ("a-old", "a", "897"), ("b", "b", "7"), ("own-1", "own", "18"), ("none", "c", "name"))
    ):
        await store.submit(Create(name, float(at), created(run=run), None))
        await store.take_turn(name, weight_versions=(VersionSpan(version, 0, 2),), engine=urls[0])

    async def found(**query: Any) -> dict[str, int | None]:
        page = await listed.page(SessionQuery(**query), None, 100)
        return {row["session_id"]: row["staleness"] for row in page["sessions"]}

    assert await found() == {"a": 0, "a-old": 3, "b": 2, "own-1": 2, "none": None}
    assert await found(min_staleness=2) == {"a-old": 3, "b": 2, "own-1": 2}
    assert await found(min_staleness=3) == await found(min_staleness=1, run="a") == {"a-old": 3}
    assert await store.database.read(lambda c: session_reads.newest_readable_versions(c, None)) == {
        "a": 900,
        "b": 7,
        "own": 18,
    }
