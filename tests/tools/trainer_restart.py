"""A trainer of nothing, which is killed and started again, with and without a checkpoint of its rollouts.

It plays rollouts that outlast its steps, trains on complete groups, and writes checkpoints.

All of what it knows is in `state.json`, which it writes once a step, beside a checkpoint of Turnlog. What it trained
on is a line a step in `samples.jsonl`: of each row the group, the attempt, the reward and the tokens. Both are what it
resumes from.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import msgspec

from ops.server import ROOT, ServerProcess
from ops.simulator.process import SimulatorProcess
from turnlog import Row, Turnlog, TurnlogError

ATTEMPTS, TURNS, TURNS_A_STEP, NEW_GROUPS = 2, 5, 2, 2
"""Rollouts of a group, turns of a rollout, how many of them a step plays, and groups that a step begins."""

STEP_SIZE = 2
"""Groups that a step trains on at most."""

PLACES = ("played", "handed out", "acknowledged", "trained")
"""Where in a step the trainer can be killed."""


class Rollout(msgspec.Struct):
    """An episode as its harness keeps it: session, history, and what it was given."""

    group_id: str
    attempt: int
    session_id: str
    messages: list[dict[str, Any]] = []
    turns: int = 0


class State(msgspec.Struct):
    """The trainer's own checkpoint. `task` counts the groups that it has begun."""

    step: int = 0
    task: int = 0
    rollouts: list[Rollout] = []


class Trainer:
    """`dies_at`: the step and the place where it is killed. `restores`: a resume takes Turnlog back to its step."""

    def __init__(self, url: str, folder: Path, dies_at: tuple[int, str] | None, *, restores: bool) -> None:
        self._turnlog = Turnlog(url)
        self._state_file, self._samples = folder / "state.json", folder / "samples.jsonl"
        self._dies_at = dies_at
        self._state = State()
        if self._state_file.exists():
            self._state = msgspec.json.decode(self._state_file.read_bytes(), type=State)
            if restores:
                self._turnlog.restore_checkpoint(f"step-{self._state.step}")
            kept = self._samples.read_text().splitlines()[: self._state.step]
            self._samples.write_text("".join(f"{line}\n" for line in kept))

    def run(self, steps: int) -> None:
        while self._state.step < steps:
            self._play()
            self._at("played")
            groups = sorted(self._turnlog.hand_out("trainer", size=STEP_SIZE), key=lambda group: str(group["group_id"]))
            self._at("handed out")
            with self._samples.open("a") as file:
                file.write(json.dumps([sample(row) for group in groups for row in group["rows"]]) + "\n")
            self._at("trained")
            self._turnlog.acknowledge("trainer", [group["group_id"] for group in groups])
            self._at("acknowledged")
            self._state.step += 1
            self._turnlog.checkpoint(f"step-{self._state.step}", drain=True)
            self._state_file.write_bytes(msgspec.json.encode(self._state))

    def _play(self) -> None:
        """Some turns of every rollout that is open, and of some new ones."""
        state = self._state
        for _ in range(NEW_GROUPS):
            state.task += 1
            group_id = f"task-{state.task}"
            state.rollouts += [Rollout(group_id, attempt, uuid.uuid4().hex) for attempt in range(ATTEMPTS)]
        for rollout in list(state.rollouts):
            try:
                self._go_on(rollout)
            except TurnlogError:
                state.rollouts.remove(rollout)  # A harness gives up what it cannot go on with.

    def _go_on(self, rollout: Rollout) -> None:
        if not rollout.turns:
            self._turnlog.create_session(
                session_id=rollout.session_id, group_id=rollout.group_id, attempt=rollout.attempt
            )
        session = self._turnlog.attach(rollout.session_id)
        for _ in range(TURNS_A_STEP + rollout.attempt % 2):
            if rollout.turns == TURNS:
                break
            said = f"{rollout.group_id}, attempt {rollout.attempt}, turn {rollout.turns}"
            messages = [*rollout.messages, {"role": "user", "content": said}]
            rollout.messages = [*messages, _chat(session, messages)]
            rollout.turns += 1
        if rollout.turns == TURNS:
            session.set_reward(float(int(_digest(rollout.messages), 16) % 7))
            session.close()
            self._state.rollouts.remove(rollout)

    def _at(self, place: str) -> None:
        if self._dies_at == (self._state.step, place):
            os.kill(os.getpid(), signal.SIGKILL)


def _chat(session: Any, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The reply's message. At temperature 0 what is sampled anew is the same. Raises TurnlogError."""
    body = {"model": "simulator", "messages": messages, "temperature": 0}
    reply: dict[str, Any] = session._transport.read("POST", f"/sessions/{session.id}/v1/chat/completions", body=body)
    message: dict[str, Any] = reply["choices"][0]["message"]
    return message


def sample(row: Row) -> list[Any]:
    """What of a row a trainer trains on."""
    trained = {name: row[name] for name in ("tokens", "loss_mask", "logprobs", "advantage")}
    return [row["group_id"], row["attempt"], row["reward"], len(row["turns"]), _digest(trained)]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def run(
    folder: Path,
    steps: int,
    dies_at: tuple[int, str] | None,
    *,
    restores: bool = True,
    database_url: str | None = None,
) -> list[list[list[Any]]]:
    """The samples of each step of a trainer that is killed at a step and place, if any, and then started again."""
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(SimulatorProcess("--seed", "5"))
        server = ServerProcess(folder, upstreams=[engine.base_url], database_url=database_url)
        if database_url is not None:
            server.migrate()
        stack.enter_context(server)
        if dies_at is not None:
            step, place = dies_at
            killed = _trainer(server.base_url, folder, steps, "--kill-at", str(step), "--die", place)
            assert killed == -signal.SIGKILL, f"the trainer ended with {killed}"
        ended = _trainer(server.base_url, folder, steps, *(["--restore"] if restores else []))
        assert ended == 0, f"the trainer ended with {ended}"
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def _trainer(url: str, folder: Path, steps: int, *arguments: str) -> int:
    command = (sys.executable, "-m", __name__, "--url", url, "--folder", str(folder), "--steps", str(steps), *arguments)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main() -> None:
    """In the trainer's own process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--die", choices=PLACES)
    parser.add_argument("--restore", action="store_true")
    given = parser.parse_args()
    dies_at = None if given.die is None else (given.kill_at, given.die)
    Trainer(given.url, given.folder, dies_at, restores=given.restore).run(given.steps)


if __name__ == "__main__":
    main()
