"""Kills the processes of a run by a seeded schedule, starts each again, and counts tokens meanwhile.

Every kill is a SIGKILL. `kills.jsonl` gets a line for each kill and each start:
`{at, name, what: killed | died | started, seconds, version}`. `seconds` is how long the process was away;
`version`, the newest weights when the kill was made, is what an engine reads that is started then.
`engine.jsonl` gets `{at, tokens}` four times a second, the engines' own count of generated tokens
over all their lives.
"""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ops.server import OwnProcess

TICK_S = 0.25
SERVED_SHARE = 0.7
"""A process that was started again is left alone for this share of its interval: on a busy machine an
engine could otherwise die whenever it is up."""

COUNTER = "vllm:generation_tokens_total"
SERVER, ENGINE, TRAINER, AGENT = "server", "engine", "trainer", "agent"


MOST_DEATHS = 50
"""Of agents by themselves, before the run has failed."""


class ProcessEnded(Exception):
    """A process of the run ended by itself, which the trainer may with 0, and an agent now and then."""


class Program(OwnProcess):
    """A process that serves no HTTP. It answers as long as it runs."""

    def answers(self) -> bool:
        return self.poll() is None


@dataclass(frozen=True)
class Schedule:
    """When processes are killed: mean seconds between two kills of a kind, each drawn from ± `jitter`.

    The trainer is killed once, when it has made `trainer_at` of its steps.
    """

    seed: int
    every_s: Mapping[str, float] = field(default_factory=lambda: {SERVER: 20.0, ENGINE: 60.0, AGENT: 30.0})
    jitter: float = 0.25
    trainer_at: float = 0.6

    def intervals(self, kind: str) -> Callable[[], float]:
        """Draws the seconds until the next kill of this kind."""
        rng = random.Random(f"{self.seed} {kind}")
        mean = self.every_s[kind]
        return lambda: mean * rng.uniform(1 - self.jitter, 1 + self.jitter)


class Supervisor:
    """Watches the processes of a run, whose names are server, engine, trainer and agent-0, agent-1, …

    Without a schedule it kills none. `restores`: the agents end with a killed trainer, and begin
    again when it has written the file `restored`.
    """

    def __init__(
        self,
        folder: Path,
        processes: Mapping[str, OwnProcess],
        steps: int,
        schedule: Schedule | None,
        *,
        restores: bool = True,
    ) -> None:
        self._folder = folder
        self._processes = processes
        self._schedule = schedule
        self._restores = restores
        self._rng = random.Random(f"{schedule.seed if schedule else 0} victims")
        self._killed_at: dict[str, float] = {}
        self._launched: dict[str, str] = {}
        self._up_since = dict.fromkeys(processes, time.monotonic())
        self._draw = {kind: schedule.intervals(kind) for kind in schedule.every_s} if schedule else {}
        self._due = {kind: time.monotonic() + draw() for kind, draw in self._draw.items()}
        self._trainer_dies_at = int(steps * schedule.trainer_at) if schedule else None
        self._waits_for_restore: list[str] = []
        self._tokens_before, self._tokens = 0, 0
        self._deaths = 0

    def run(self) -> None:
        """Watch until the trainer has ended. Raises ProcessEnded."""
        while True:
            self.count()
            self._see_starts()
            if self._processes[TRAINER].poll() == 0:
                return
            self._see_ends()
            self._kill_due()
            time.sleep(TICK_S)

    def count(self) -> None:
        """Read the engine's counter, which begins anew with each of its lives."""
        engine = self._processes[ENGINE]
        try:
            with urllib.request.urlopen(engine.base_url + "/metrics", timeout=2) as reply:
                text: str = reply.read().decode()
        except OSError:
            return
        self._tokens = generated(text)
        self._note("engine.jsonl", at=time.time(), tokens=self._tokens_before + self._tokens)

    def _see_starts(self) -> None:
        if self._waits_for_restore and (self._folder / "restored").exists():
            for name in self._waits_for_restore:
                self._processes[name].launch()
            self._waits_for_restore = []
        for name, killed_at in list(self._killed_at.items()):
            if name not in self._waits_for_restore and self._processes[name].answers():
                del self._killed_at[name]
                self._up_since[name] = time.monotonic()
                self._told(name, "started", seconds=time.monotonic() - killed_at)

    def _see_ends(self) -> None:
        for name, process in self._processes.items():
            if name in self._waits_for_restore or (code := process.poll()) is None:
                continue
            self._deaths += 1
            if name.partition("-")[0] != AGENT or self._deaths > MOST_DEATHS:
                raise ProcessEnded(f"{name} ended with {code}, see {process.log_path}")
            self._told(name, "died")
            self._killed_at.setdefault(name, time.monotonic())
            process.launch()

    def _kill_due(self) -> None:
        now = time.monotonic()
        for kind, due in self._due.items():
            served_s = SERVED_SHARE * self._schedule.every_s[kind] if self._schedule else 0.0
            names = [
                name
                for name in self._processes
                if name.partition("-")[0] == kind
                and name not in self._killed_at
                and now - self._up_since[name] >= served_s
            ]
            if now >= due and names:
                self._kill(self._rng.choice(names))
                self._due[kind] = now + self._draw[kind]()
        if self._trainer_dies_at is not None and self._steps() >= self._trainer_dies_at:
            self._trainer_dies_at = None
            self._kill_trainer()

    def _kill_trainer(self) -> None:
        (self._folder / "restored").unlink(missing_ok=True)
        time.sleep(self._rng.uniform(0, 2.0))  # anywhere in its next steps
        self._kill(TRAINER, launch=False)
        if self._restores:
            # A reward that an agent sends after the restore would count (docs/checkpoints.md).
            for name in self._processes:
                if name.partition("-")[0] == AGENT:
                    self._kill(name, launch=False)
                    self._waits_for_restore.append(name)
        self._processes[TRAINER].launch()

    def _kill(self, name: str, *, launch: bool = True) -> None:
        if name == ENGINE:
            self.count()  # what it generates from here to its death is not counted
            self._tokens_before, self._tokens = self._tokens_before + self._tokens, 0
        self._processes[name].kill()
        self._killed_at.setdefault(name, time.monotonic())
        newest = self._folder / "weights" / "newest"
        if newest.is_symlink():
            self._launched[name] = newest.readlink().name
        self._told(name, "killed")
        if launch:
            self._processes[name].launch()

    def _steps(self) -> int:
        path = self._folder / "steps.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def _told(self, name: str, what: str, seconds: float | None = None) -> None:
        version = self._launched.get(name)
        self._note("kills.jsonl", at=time.time(), name=name, what=what, seconds=seconds, version=version)

    def _note(self, file: str, **line: object) -> None:
        with (self._folder / file).open("a") as log:
            log.write(json.dumps(line) + "\n")


def generated(metrics: str) -> int:
    """The tokens that an engine has generated, as its Prometheus text says."""
    return sum(int(float(line.split()[-1])) for line in metrics.splitlines() if line.startswith(COUNTER))
