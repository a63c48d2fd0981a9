"""Two trainers, each with a run, agents and an engine of its own, on one server: ten steps each, under `kill -9` of the
server, of trainers and of engines. Whatever one of them reads, is given, holds or changes is of its own run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from helpers.databases import connected
from integration.stand import until
from sqlalchemy import text

from app.domain import fleet
from app.domain.events import decode
from app.domain.fleet import FleetPaused, FleetResumed
from fault.processes import Processes, serving
from fault.run_trainer import CONSUMER, GROUPS, NAME, VERSIONS, Note, Trainer, notes_of
from fault.table import Tally
from fault.verified import verified
from ops.server import ROOT, OwnProcess
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

STEPS = int(os.environ.get("STEPS", "10"))
PATIENCE_S = 180.0
RUNS = ("alpha", "beta")


class Kill(NamedTuple):
    """`victim` dies when the trainer of the run `at` has come to that phase of the step, and is started again."""

    at: str
    step: int
    phase: str
    victim: str


KILLS = (
    Kill("alpha", 2, "play", "server"),
    Kill("alpha", 3, "load", "engine of beta"),
    Kill("beta", 4, "play", "beta"),
    Kill("beta", 4, "load", "server"),
    Kill("alpha", 5, "play", "alpha"),
    Kill("beta", 5, "play", "engine of alpha"),
    Kill("alpha", 6, "checkpoint", "server"),
    Kill("beta", 7, "load", "beta"),
    Kill("alpha", 8, "feed", "alpha"),
    Kill("beta", 8, "acknowledge", "server"),
    Kill("alpha", 9, "acknowledge", "alpha"),
    Kill("beta", 10, "load", "engine of alpha"),
)
"""Of each trainer in this order. A trainer that is started again takes its run back to its last checkpoint every second
time."""


class Own:
    """A trainer's process, its folder, its engine, and what that engine has been asked in all its lives."""

    def __init__(self, url: str, run: str, folder: Path) -> None:
        self.run, self.number, self.folder = run, 1 + RUNS.index(run), folder / run
        self.folder.mkdir()
        versions = ("--weight-version", str(VERSIONS * self.number))
        self.engine = SimulatorProcess("--seed", str(self.number), "--keep-requests", "100000", *versions).start()
        self.asked: list[dict[str, Any]] = []
        self.lives = 0
        self._url = url
        self._process: Any = None

    def start(self) -> None:
        command = [sys.executable, "-m", "fault.run_trainer", "--url", self._url, "--engine", self.engine.base_url]
        command += ["--run", self.run, "--number", str(self.number), "--folder", str(self.folder)]
        command += ["--steps", str(STEPS), *(["--restore"] if self.lives % 2 else [])]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
        with (self.folder / "log").open("ab") as log:
            self._process = OwnProcess.spawn(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self.lives += 1

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def notes(self, what: str) -> list[Note]:
        return [one for one in notes_of(self.folder) if one["what"] == what]

    def has_come_to(self, step: int, phase: str) -> bool:
        assert self._process.poll() in (None, 0), (self.folder / "log").read_text()[-3000:]
        return any((one["step"], one["phase"]) == (step, phase) for one in self.notes("phase"))

    def is_done(self) -> bool:
        self.has_come_to(0, "")
        return bool(self.notes("end"))

    def look_at_engine(self) -> None:
        """Before it dies, and at the end."""
        with httpx.Client(base_url=self.engine.base_url) as sim:
            self.asked += sim.get("/sim/requests", params={"last": 100_000}).json()

    def pauses(self) -> list[tuple[float, float]]:
        """From the order until the gate was opened again, maybe by the life after."""
        found, began = [], None
        for one in notes_of(self.folder):
            if one["what"] == "pause":
                began = one["at"] if began is None else began
            elif one["what"] == "resume":
                assert began is not None
                found.append((began, one["at"]))
                began = None
        assert began is None
        return found


@contextlib.contextmanager
def trainers(processes: Processes, folder: Path) -> Iterator[dict[str, Own]]:
    own = {run: Own(processes.urls[number % len(processes.urls)], run, folder) for number, run in enumerate(RUNS)}
    try:
        for one in own.values():
            given = {"url": one.engine.base_url, "run": one.run}
            assert httpx.post(f"{processes.urls[0]}/engines", json=given).status_code == 200
        for one in own.values():
            one.start()
        yield own
    finally:
        for one in own.values():
            one.kill()
            one.engine.stop()


def kill_all(processes: Processes, own: dict[str, Own], kills: Sequence[Kill], tally: Tally) -> None:
    """Each when its trainer has come to its place, or at once if that has been passed."""
    left, rng = list(kills), random.Random(3)
    while left:
        until(lambda: any(own[one.at].has_come_to(one.step, one.phase) for one in left), PATIENCE_S)
        kill = next(one for one in left if own[one.at].has_come_to(one.step, one.phase))
        left.remove(kill)
        time.sleep(rng.uniform(0, 0.2))
        if kill.victim == "server":
            server = processes.servers[tally.tried % len(processes.servers)]
            server.kill()
            server.start()
        elif kill.victim in own:
            own[kill.victim].kill()
            own[kill.victim].start()
        else:
            one = own[kill.victim.removeprefix("engine of ")]
            one.look_at_engine()
            one.engine.kill()
            one.engine.start()
        tally.tried += 1


@pytest.mark.long
@pytest.mark.fault(1, "kill -9 of server, trainer and engine under two runs")
@pytest.mark.parametrize("count", [1, 2], ids=["sqlite", "postgresql-2"])
def test_nothing_of_one_run_comes_to_the_other(
    count: int, tally: Tally, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url: str = request.getfixturevalue("postgres_url" if count > 1 else "sqlite_url")
    with serving(tmp_path, count, url, "http://127.0.0.1:9") as processes, trainers(processes, tmp_path) as own:
        kill_all(processes, own, [one for one in KILLS if one.step <= STEPS], tally)
        until(lambda: all(one.is_done() for one in own.values()), PATIENCE_S)
        for one in own.values():
            one.look_at_engine()
        acknowledged = [
            Acknowledged(note["session"], note["turn"], note["sha256"])
            for one in own.values()
            for note in one.notes("turn")
        ]
        verified(url, acknowledged, tally)
        for run in RUNS:
            print(run, json.dumps(judged(own[run], processes.urls[0], url)))


def judged(own: Own, base_url: str, url: str) -> dict[str, int]:
    """What engine, fleet, feed, export and names have of the run, counted; all of it is the run's."""
    run, mine = own.run, range(VERSIONS * own.number, VERSIONS * (own.number + 1))
    chats = [one for one in own.asked if one["path"].endswith("/completions")]
    assert all(f"of run {run}" in one["content"] for chat in chats for one in said(chat["body"]["messages"]))
    orders = [one for one in own.asked if one["path"] in ("/pause_generation", "/continue_generation")]
    pauses = own.pauses()
    assert all(any(began <= one["arrived"] <= ended for began, ended in pauses) for one in orders)

    of_gate = rows(url, "SELECT type, version, data FROM fleet_events WHERE key = :key", key=f"run:{run}/fleet")
    gates = [one for row in of_gate if isinstance(one := decode(*row, fleet.TYPES), FleetPaused | FleetResumed)]
    assert len(gates) == len(of_gate) > 0
    assert {one.run for one in gates} == {run}
    assert {int(one.version) for one in gates if one.version is not None} <= {*mine}

    assert own.lives == 1 or own.notes("restored")
    states = rows(url, "SELECT group_id, consumer, acked_at IS NOT NULL FROM groups WHERE run = :run", run=run)
    expected = {f"task-{step}-{group}" for step in range(1, STEPS + 1) for group in range(GROUPS)}
    assert sorted(map(tuple, states)) == sorted((name, CONSUMER, True) for name in expected)
    assert {name for note in own.notes("acknowledged") for name in note["groups"]} == expected

    with httpx.Client(base_url=base_url, timeout=PATIENCE_S) as client:
        exported = client.get("/export", params={"run": run, "evaluation": "true"}).text.splitlines()
        names = client.get("/sessions", params={"run": run, "name": NAME, "limit": 1000}).json()["sessions"]
    sessions = {one.session_id for one in rows(url, "SELECT session_id FROM sessions WHERE run = :run", run=run)}
    seen = {one for note in own.notes("seen") for one in note["sessions"]}
    assert seen <= sessions
    trainer = Trainer.__new__(Trainer)
    trainer.run, trainer._first_version = run, mine.start
    for line in exported:
        trainer.judge_row(json.loads(line))
    assert {one["run"] for one in names} == {run}
    assert len(names) >= STEPS
    return {
        "steps": len(own.notes("done")),
        "lives": own.lives,
        "restores": len(own.notes("restored")),
        "turns acknowledged": len(own.notes("turn")),
        "groups given": len(own.notes("given")),
        "groups acknowledged": len(states),
        "rows": len(exported),
        "requests of the engine": len(chats),
        "pauses": len(pauses),
        "orders of the engine": len(orders),
        "events of the gate": len(gates),
        "generations of the name": len(names),
        "sessions": len(sessions),
        "sessions in its events": len(seen),
    }


def rows(url: str, query: str, **parameters: Any) -> list[Any]:
    async def read() -> list[Any]:
        async with connected(url) as connection:
            return list((await connection.execute(text(query), parameters)).all())

    return asyncio.run(read())


def said(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (one for one in messages if one["role"] == "user")
