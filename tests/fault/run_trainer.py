"""A trainer of one run on a server that others use too: `python -m fault.run_trainer …`, which a test kills.

It plays the attempts of its groups with agents of its own, takes the groups from its run's feed, raises the weight
version of its engine behind its run's pause, acknowledges, and makes a checkpoint of its run every few steps. Started
again, it goes on with the step that it was in; with `--restore` it takes its run back to its last checkpoint first.
Groups, names and consumer are called as in every other run. All that it reads has to be its own: `Foreign` ends it.

`notes.jsonl` in its folder has what it was told, a line each: `begin` of a life, `phase`s, acknowledged `turn`s,
`pause` and `resume` (by the monotonic clock), groups that were `given` and `acknowledged`, sessions `seen` in its
events, `checkpoint`s, `restored`, `done`, `end`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from integration.stand import CHAT, user

from fault.agents import Insistent
from ops.verify import Acknowledged
from turnlog import Conflict, EnginesFailed, EventParameters, ExportFilters, InvalidRequest, PositionGone, Turnlog

GROUPS = 2
ATTEMPTS = 2
TURNS = 2
CHECKPOINT_EVERY = 3
VERSIONS = 1000
"""Between the weight versions of one run and those of the next."""

RETRY_FOR_S = 90.0
POLL_S = 0.05
PAUSE_S = 0.3
"""How long weights take to load, so that a kill may come meanwhile."""

NAME = "planner"
CONSUMER = "trainer"
FAILED = {"failed": {"kind": "sandbox", "message": "no more memory"}}

Note = dict[str, Any]


class Foreign(Exception):
    """Something of another run."""


def notes_of(folder: Path) -> list[Note]:
    file = folder / "notes.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def size_of(group: str) -> int:
    """The first group of a step has one attempt more, which fails."""
    return ATTEMPTS + group.endswith("-0")


class Agent(Insistent):
    """Notes each turn before it goes on."""

    again = (502, 503, 507)

    def __init__(self, trainer: Trainer, name: str) -> None:
        super().__init__([trainer.url], name, seed=1)
        self._trainer = trainer

    def told(self, reply: httpx.Response, headers: Mapping[str, str] | None) -> Acknowledged:
        told = super().told(reply, headers)
        is_verbatim = "-evaluation-" not in told.session_id  # replies to evaluations are not the engine's bytes
        sha256 = told.reply_sha256 if is_verbatim else None
        self._trainer.note("turn", session=told.session_id, turn=told.turn, sha256=sha256)
        return told


class Trainer:
    def __init__(self, url: str, engine: str, run: str, number: int, folder: Path) -> None:
        self.url, self.run = url, run
        self._engine = engine
        self._first_version = VERSIONS * number
        notes = notes_of(folder)
        self._life = sum(one["what"] == "begin" for one in notes)
        self._file = (folder / "notes.jsonl").open("ab", buffering=0)  # a line is one write, which a kill does not cut
        self._turnlog = Turnlog(url, retry_for_s=RETRY_FOR_S)
        self._http = Agent(self, "trainer")
        self._cursor: str | None = None
        self._position: str | None = None
        self.step = next((one["step"] for one in reversed(notes) if one["what"] in ("done", "restored")), 0)
        self._checkpoints = [(one["name"], one["step"]) for one in notes if one["what"] == "checkpoint"]
        self.note("begin", life=self._life, step=self.step)

    def note(self, what: str, **said: Any) -> None:
        self._file.write(json.dumps({"what": what, **said}).encode() + b"\n")

    def own(self, what: str, runs: Iterable[str]) -> None:
        """Raises Foreign."""
        if others := set(runs) - {self.run}:
            raise Foreign(f"{what} of {others} at {self.run}")

    def go_on(self, steps: int) -> None:
        self._clear()
        self._load()
        while self.step < steps:
            number = self.step + 1
            self._phase(number, "play")
            self._play(number)
            self._phase(number, "feed")
            groups = self._take(number)
            self._phase(number, "load")
            self._load(number)
            self._phase(number, "acknowledge")
            self._acknowledge(groups)
            self._look()
            self.step = number
            self.note("done", step=number)
            if number % CHECKPOINT_EVERY == 0:
                self._phase(number, "checkpoint")
                self._checkpoint()
        self.note("end")

    def restore(self) -> None:
        """Take the run back to its last checkpoint."""
        if not self._checkpoints:
            return
        name, step = self._checkpoints[-1]
        self._http.insist("POST", f"/checkpoints/{name}/restore", params={"run": self.run})
        self.step, self._cursor, self._position = step, None, None
        self.note("restored", name=name, step=step)

    def _phase(self, step: int, phase: str) -> None:
        self.note("phase", step=step, phase=phase)

    def _clear(self) -> None:
        """End what the life before left open: nobody will."""
        left = list(self._turnlog.sessions(run=self.run, status="open"))
        self.own("sessions", (one["run"] for one in left))
        for one in left:
            if one["name"] != NAME:
                self._turnlog.attach(one["session_id"]).close()

    def _play(self, number: int) -> None:
        """All attempts of the step's groups, one more of the first group that fails, one that evaluates, and a turn of
        the name that all runs have."""
        there = {one["group_id"] for one in self._groups() if one["state"] != "open"}
        groups = [name for name in map(f"task-{number}-{{}}".format, range(GROUPS)) if name not in there]
        places = [(group, attempt) for group in groups for attempt in range(size_of(group))]
        with ThreadPoolExecutor(4) as threads:
            played = [threads.submit(self._attempt, group, attempt) for group, attempt in places]
            played += [threads.submit(self._attempt, f"task-{number}-0", 0, evaluation=True)]
            played += [threads.submit(self._plan, number)]
            for one in played:
                one.result()

    def _attempt(self, group: str, attempt: int, **fields: Any) -> None:
        kind = "evaluation" if fields else "attempt"
        agent = Agent(self, f"{self.run}-{self._life}-{self.step + 1}-{group}-{kind}-{attempt}")
        has_failed = attempt == ATTEMPTS
        given = {"group_id": group, "attempt": attempt, "group_size": size_of(group), "on_abort": "continue"}
        agent.begin(run=self.run, **given, **fields)
        for turn in range(TURNS):
            agent.say(f"Turn {turn} of run {self.run}", sim={"latency_s": agent.rng.uniform(0, 0.1)})
        if has_failed:
            agent.insist("POST", f"/sessions/{agent.session_id}/close", json=FAILED)
        else:
            agent.reward(self._first_version + agent.rng.random())
            agent.end()
        agent.close()

    def _plan(self, number: int) -> None:
        """A turn of a session that headers name, which then ends: the next step's is the name's next generation."""
        agent = Agent(self, f"{self.run} {NAME} {number}")
        headers = {"x-session-id": NAME, "x-turnlog-run": self.run, "idempotency-key": f"plan {number}"}
        body = {"model": "simulator", "messages": [user(f"Plan {number} of run {self.run}")]}
        reply = agent.insist("POST", CHAT, json=body, headers=headers)
        agent.session_id = reply.headers["x-turnlog-session-id"]
        if agent.session_id not in {one["session_id"] for one in self._turnlog.sessions(run=self.run, name=NAME)}:
            raise Foreign(f"{NAME} is {agent.session_id} of another run")
        agent.told(reply, None)
        of_run = {"x-turnlog-run": self.run}
        agent.insist("POST", "/finish_session", params={"session_id": NAME}, headers=of_run)
        agent.close()

    def _groups(self) -> list[Any]:
        found = list(self._turnlog.groups(run=self.run))
        self.own("groups", (one["run"] for one in found))
        return found

    def _take(self, number: int) -> list[str]:
        """The groups of the step, those that were acknowledged before the last kill among them."""
        wanted = {f"task-{number}-{group}" for group in range(GROUPS)}
        done = {one["group_id"] for one in self._groups() if one["state"] == "acknowledged"}
        given: set[str] = set()
        while missing := wanted - done - given:
            for group in self._turnlog.hand_out(CONSUMER, size=10, run=self.run, stale="keep"):
                self._judge(group)
                if group["group_id"] not in wanted:
                    raise Foreign(f"{group['group_id']} of another step, while {missing} are missing")
                given.add(group["group_id"])
                self.note("given", group=group["group_id"], step=number)
            time.sleep(POLL_S)
        return sorted(given)

    def _judge(self, group: Mapping[str, Any]) -> None:
        """Group and rows are of this run, from its engine, and no failure or evaluation is in the statistics."""
        self.own("a group", [group["run"]])
        for row in group["rows"]:
            self.judge_row(row)
        rewards = [one["reward"] for one in group["attempts"] if one["failed"] is None]
        counted = group["statistics"]["count"]
        if counted != len(rewards) or any(not self._is_mine(reward) for reward in rewards):
            raise Foreign(f"{group['group_id']} has the rewards {rewards}, of which {counted} count")

    def judge_row(self, row: Mapping[str, Any]) -> None:
        self.own("a row", [row["run"]])
        said = [one["content"] for one in row["messages"] if one["role"] == "user"]
        if not all(f"of run {self.run}" in text for text in said):
            raise Foreign(f"{row['session_id']} of {self.run} says {said}")
        versions = {version for version in row["weight_versions"] if version >= 0}
        if not versions or not all(map(self._is_mine, versions)):
            raise Foreign(f"{row['session_id']} of {self.run} is of the weights {versions}")

    def _is_mine(self, number: float) -> bool:
        return 0 <= number - self._first_version < VERSIONS

    def _acknowledge(self, groups: list[str]) -> None:
        if groups:
            told = self._turnlog.acknowledge(CONSUMER, groups, run=self.run)
            self.note("acknowledged", groups=[*told["acknowledged"], *told["already"]])
            if told["unknown"] or told["not_leased"]:
                raise Foreign(f"{groups} were given, and then {told}")

    def _look(self) -> None:
        """What has changed in the run since the last look."""
        try:
            asked: ExportFilters = {"run": self.run}
            if self._cursor is not None:
                asked["cursor"] = self._cursor
            rows = self._turnlog.export(**asked)
            for row in rows:
                self.judge_row(row)
            self._cursor = rows.next_cursor
            wanted: EventParameters = {"run": self.run}
            if self._position is not None:
                wanted["after"] = self._position
            events = self._turnlog.events(**wanted)
            self.note("seen", sessions=sorted({str(event["session_id"]) for event in events}))
            self._position = events.position
        except (InvalidRequest, PositionGone):
            # The run was taken back.
            if self._cursor is None and self._position is None:
                raise
            self._cursor = self._position = None
            self._look()
            return

    def _load(self, step: int | None = None) -> None:
        """Raise the engine's weight version behind the run's gate, also at an engine that has begun anew meanwhile."""
        version = str(self._first_version + (self.step if step is None else step))
        self.note("pause", at=time.monotonic())
        try:
            told = self._turnlog.pause_fleet(run=self.run)
            if list(told["engines"]) != [self._engine]:
                raise Foreign(f"{self.run} has paused {list(told['engines'])}")
        except EnginesFailed:
            pass  # It is down: the gate is shut.
        time.sleep(PAUSE_S)
        while not self._is_loaded(version):
            time.sleep(POLL_S)
        with contextlib.suppress(EnginesFailed):
            self._turnlog.resume_fleet(version=version, run=self.run)
        self.note("resume", at=time.monotonic(), version=version)

    def _is_loaded(self, version: str) -> bool:
        try:
            httpx.post(f"{self._engine}/update_weight_version", json={"new_version": version}, timeout=10)
        except httpx.TransportError:
            return False
        return True

    def _checkpoint(self) -> None:
        """Names are a run's: both have those of their steps; a life more makes another one."""
        name = f"step-{self.step}-{self._life}-{random.randbytes(2).hex()}"
        try:
            self._turnlog.checkpoint(name, drain=True, run=self.run)
        except Conflict as error:
            if error.code != "checkpoint_exists":
                raise
        self.note("checkpoint", name=name, step=self.step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--restore", action="store_true")
    given = parser.parse_args()
    trainer = Trainer(given.url, given.engine, given.run, given.number, given.folder)
    if given.restore:
        trainer.restore()
    trainer.go_on(given.steps)


if __name__ == "__main__":
    main()
