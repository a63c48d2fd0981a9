"""Claude Code and Codex at work, in default settings, while the server is killed at random moments.

Each run has several turns and survives at least one `kill -9`; the test starts the server again at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.stand import Stand, Talk, standing

from e2e.programs import PROGRAMS, RUN_S, Place
from e2e.test_programs import Said, owned, plan

pytestmark = [pytest.mark.harness, pytest.mark.long]

KILLS = 20
AT_ONCE = 2
STEPS = 5
LATENCY_S = 0.4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with standing(tmp_path_factory.mktemp("kills"), "--seed", "5") as made:
        yield made


class Run:
    """One program on a task of several turns."""

    def __init__(self, server: Stand, program: str, folder: Path) -> None:
        folder.mkdir()
        self.talk: Talk = server.talk()
        self.process = PROGRAMS[program].start(Place(f"{server.base_url}{self.talk.path}", folder), "Step 0", {})

    def until_over(self) -> bool:
        """Did it end well?"""
        output, _ = self.process.communicate(timeout=RUN_S)
        return self.process.returncode == 0 and "All done." in output


@pytest.mark.parametrize("program", ["Claude Code", "Codex"])
def test_kills_cost_generations_and_nothing_else(server: Stand, tmp_path: Path, program: str) -> None:
    chance = random.Random(f"{program}-1")
    server.sim.post("/sim/reset").raise_for_status()
    shell = PROGRAMS[program].shell
    for step in range(STEPS):
        plan(server, Said(f"Step {step}", "Next. ", [shell(f"echo Step $(({step} + 1))")], LATENCY_S), count=1000)
    plan(server, Said("", "All done.", latency_s=LATENCY_S), count=1000)
    kills, runs, finished = 0, [], 0
    while kills < KILLS // 2:
        now = [Run(server, program, tmp_path / str(len(runs) + place)) for place in range(AT_ONCE)]
        runs += now
        while kills < KILLS // 2 and any(run.process.poll() is None for run in now):
            time.sleep(chance.uniform(0.5, 2.5))
            server.server.kill()
            server.server.start()
            kills += 1
        finished += sum(run.until_over() for run in now)
    generations: int = server.stats()["finished"]
    lost = doubled = turns = 0
    for run in runs:
        turns += len(run.talk.committed())
        not_there, several = owned(run.talk, run.talk.rows())
        lost, doubled = lost + not_there, doubled + several
    interrupted = sum(kind == "TurnAbandoned" for run in runs for kind in run.talk.types())
    forks = sum(
        branch["cause"] not in ("start", *PROGRAMS[program].causes)
        for run in runs
        for branch in run.talk.tree()["branches"]
    )
    assert (finished, lost, doubled, forks) == (len(runs), 0, 0, 0)
    assert generations - turns <= interrupted, "beyond the generations that died with the server none is doubled"
