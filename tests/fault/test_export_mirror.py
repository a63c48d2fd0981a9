"""Whoever follows an export by its cursor has in the end what a fresh export gives, whatever happened to sessions."""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from integration.stand import Api, Talk, user

from ops.server import ServerProcess

pytestmark = pytest.mark.long

Row = dict[str, Any]

CLIENTS, SESSIONS = 8, 24

OF_THE_MOMENT = ("cursor", "as_of_seq", "rollout_rows", "rollout_weight")
"""Fields that other events, or other sessions of the rollout, may change. The last two follow from the rows."""


@pytest.fixture
def clients(servers: list[ServerProcess]) -> Iterator[list[Api]]:
    made = [Api(server.base_url) for server in servers]
    yield made
    for client in made:
        client.http.close()


class Mirror:
    """The rows of each session, as the windows of an export have told them, each asked of the next of the servers."""

    def __init__(self, servers: list[Api]) -> None:
        self._servers = servers
        self._cursor: str | None = None
        self.rows: dict[str, list[Row]] = {}
        self.windows = 0

    def follow(self) -> None:
        self.windows += 1
        parameters = {"explain": "true"} | ({} if self._cursor is None else {"cursor": self._cursor})
        response = self._servers[self.windows % len(self._servers)].http.get("/export", params=parameters)
        assert response.status_code == 200, response.text
        told: dict[str, list[Row]] = {}
        for row in map(json.loads, response.content.split(b"\n")[:-1]):
            rows = told.setdefault(row["session_id"], [])
            if "excluded" not in row:
                rows.append(row)
        self.rows |= told
        self._cursor = response.headers["x-turnlog-next-cursor"]


def test_a_mirror_of_an_export_is_what_a_fresh_one_gives(clients: list[Api]) -> None:
    mirror = Mirror(clients)
    done: Counter[str] = Counter()
    with ThreadPoolExecutor(CLIENTS) as threads:
        running = [threads.submit(live, clients, seed, done) for seed in range(CLIENTS)]
        while not all(one.done() for one in running):
            mirror.follow()
        for one in running:
            one.result()
    mirror.follow()
    fresh: dict[str, list[Row]] = {}
    for row in clients[0].rows():
        fresh.setdefault(row["session_id"], []).append(row)
    mirrored = {session_id: rows for session_id, rows in mirror.rows.items() if rows}
    differing = [
        session_id
        for session_id in sorted(mirrored.keys() | fresh.keys())
        if [lasting(row) for row in mirrored.get(session_id, [])] != [lasting(row) for row in fresh.get(session_id, [])]
    ]
    print(f"{done}: {len(fresh)} sessions, {mirror.windows} windows, {len(differing)} differ")
    assert differing == []
    counts = Counter(row["rollout_id"] for rows in mirrored.values() for row in rows)
    assert all(row["rollout_rows"] == counts[row["rollout_id"]] for rows in fresh.values() for row in rows)
    assert min(done["erased"], done["parent later"], mirror.windows) > 2


def lasting(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in OF_THE_MOMENT}


def live(servers: list[Api], seed: int, done: Counter[str]) -> None:
    """One client's sessions, of which some name a parent that is created later, as is perhaps its own."""
    chance = random.Random(seed)
    made: list[str] = []
    promised: list[str] = []

    def server() -> Api:
        return chance.choice(servers)

    def new(session_id: str, **body: Any) -> None:
        reply = server().http.post("/sessions", json={"session_id": session_id, **body})
        assert reply.status_code in (200, 404), reply.text  # 404: the root of its rollout is closed
        if reply.status_code == 200:
            made.append(session_id)
            done["created"] += 1

    for _ in range(SESSIONS):
        session_id, parent = uuid.uuid4().hex, uuid.uuid4().hex
        match chance.randrange(4):
            case 0:
                new(session_id, parent_session_id=parent)
                promised.append(parent)
            case 1 if promised:
                later = promised.pop(chance.randrange(len(promised)))
                is_between = chance.random() < 0.5
                if is_between:
                    promised.append(parent)
                new(later, group_id=f"g{seed}", **({"parent_session_id": parent} if is_between else {}))
                done["parent later"] += 1
            case _:
                new(session_id, group_id=f"g{seed}", history=chance.choice(["linear", "tree"]))
        for session_id in chance.sample(made, min(4, len(made))):
            step(server(), session_id, chance, done)


def step(server: Api, session_id: str, chance: random.Random, done: Counter[str]) -> None:
    """Something happens to a session; refused where that has ended."""
    path = f"/sessions/{session_id}"
    match chance.randrange(7):
        case 0 | 1 | 2:
            what, reply = "turns", Talk(server, session_id).chat([user(uuid.uuid4().hex)])
        case 3:
            what, reply = "rewarded", server.http.put(f"{path}/reward", json={"reward": chance.random()})
        case 4:
            what, reply = "noted", server.http.put(f"{path}/annotations/note", json={"value": "seen"})
        case 5:
            what, reply = "closed", server.http.delete(path)
        case _:
            what, reply = "erased", server.http.delete(path, params={"erase": "true"})
    assert reply.status_code < 500, reply.text
    done[what] += reply.is_success
