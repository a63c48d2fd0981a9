"""Exports while sessions are written: consistent prefixes, windows that join, cursors that give the same again."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from integration.stand import until

from fault.agents import PATIENCE_S, Agents
from fault.histories import Author, State, fitting
from fault.table import Tally
from fault.verified import verified
from ops.server import ServerProcess

pytestmark = pytest.mark.long

CONSISTENT = "exports during writes are consistent prefixes"
CLIENTS = 16
REASONS = {"no committed turn", "rolled back", "erased"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Exported:
    """One export: when it was asked for and when it had begun, its rows, and the cursors."""

    asked: float
    begun: float
    lines: list[bytes]
    cursor: str
    following: str

    @property
    def rows(self) -> list[Row]:
        return [json.loads(line) for line in self.lines]


def export(http: httpx.Client, **query: str) -> Exported:
    asked = time.monotonic()
    with http.stream("GET", "/export", params=query) as response:
        begun = time.monotonic()
        assert response.status_code == 200
        lines = response.read().splitlines()
    head = response.headers
    return Exported(asked, begun, lines, head["x-turnlog-cursor"], head["x-turnlog-next-cursor"])


class Reader:
    """Follows the store by windows, takes it whole now and then, and asks for old windows again."""

    def __init__(self, authors: Agents[Author], urls: list[str]) -> None:
        self._authors = authors
        self._clients = [httpx.Client(base_url=url, timeout=PATIENCE_S) for url in urls]
        self._cursor = ""
        self.latest: dict[str, Row] = {}
        self.windows: list[Exported] = []
        self.exports = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *raised: object) -> None:
        for client in self._clients:
            client.close()

    def round(self) -> None:
        """The next window, everything, and one of the windows of before, each from the next of the servers."""
        self._follow()
        whole = self.whole()
        self._check(whole, {row["session_id"]: row for row in whole.rows})
        old = self.windows[self.exports % len(self.windows)]
        self._repeat(old)

    def whole(self) -> Exported:
        return self._export(explain="false")

    def _export(self, **query: str) -> Exported:
        self.exports += 1
        return export(self._clients[self.exports % len(self._clients)], **query)

    def _follow(self) -> None:
        window = self._export(explain="true", **({"cursor": self._cursor} if self._cursor else {}))
        self._cursor = window.following
        self.windows.append(window)
        rows = window.rows
        given = [row["session_id"] for row in rows if "excluded" not in row]
        assert len(set(given)) == len(given), "twice in one window"
        assert {row["excluded"] for row in rows if "excluded" in row} <= REASONS
        for row in rows:
            before = self.latest.pop(row["session_id"], None) if row.get("turn") is None else None
            if "excluded" not in row:
                assert before is None or before["as_of_seq"] < row["as_of_seq"], "nothing had changed"
                self.latest[row["session_id"]] = row
        self._check(window, self.latest)

    def _check(self, asked: Exported, rows: dict[str, Row]) -> None:
        """Every session that had a turn when the export was asked for is there, in a state that it was in."""
        for author in self._authors:
            for session_id, states in list(author.states.items()):
                row = rows.get(session_id)
                if row is not None:
                    check_row(row, states, asked)
                    continue
                due = [state for state in list(states) if state.told <= asked.asked]
                assert states[-1].erased or not due or not due[-1].live, f"{session_id} is missing"

    def erased(self) -> set[str]:
        """Sessions that are erased, or are just being; no window tells of that."""
        return {one for author in self._authors for one, states in list(author.states.items()) if states[-1].erased}

    def _repeat(self, old: Exported) -> None:
        """The same bytes, but for sessions that have been erased since, of which it says so."""
        again = self._export(explain="true", cursor=old.cursor)
        erased = self.erased()
        kept = [line for line in old.lines if json.loads(line)["session_id"] not in erased]
        assert [line for line in again.lines if json.loads(line)["session_id"] not in erased] == kept
        assert (again.cursor, again.following) == (old.cursor, old.following)
        for line in set(again.lines) - set(old.lines):
            assert json.loads(line)["excluded"] == "erased"


def check_row(row: Row, states: list[State], asked: Exported) -> None:
    """What a row shows may be committed and not acknowledged yet: then its author will soon know of it."""
    deadline = time.monotonic() + PATIENCE_S
    while not fitting(row, list(states), asked.asked, asked.begun):
        assert time.monotonic() < deadline, f"no state of its session: {row}"
        time.sleep(0.01)


@pytest.mark.fault(12, CONSISTENT)
@pytest.mark.parametrize("seconds", [2.0, pytest.param(20.0, marks=pytest.mark.untimed)])
def test_exports_during_writes_are_consistent(servers: list[ServerProcess], tally: Tally, seconds: float) -> None:
    urls = [server.base_url for server in servers]
    with Agents(urls, CLIENTS, Author.act, kind=Author) as authors, Reader(authors, urls) as reader:
        until(lambda: len(authors.acknowledged) > CLIENTS, 60)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or reader.exports < 6:
            reader.round()
            tally.tried += 3
        authors.stop()
        reader.round()
        whole = {row["session_id"]: row for row in reader.whole().rows}
        erased = reader.erased()
    together = {name: row for name, row in reader.latest.items() if name not in erased}
    assert without_cursors(together) == without_cursors(whole), "the windows together are the whole"
    assert {answer.status for answer in authors.answers()} <= {200, 204}
    tally.doubled += authors.doubled(urls[0])
    verified(servers[0].environment["TURNLOG_DATABASE_URL"], authors.acknowledged, tally)


def without_cursors(rows: dict[str, Row]) -> dict[str, Row]:
    return {name: {key: field for key, field in row.items() if key != "cursor"} for name, row in rows.items()}
