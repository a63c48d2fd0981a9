"""A seed is enough to see a schedule again: the same trace to the byte, wherever and after whatever it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.simulation.schedule import Simulation

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]

SEED, SCHEDULES = 40, 6


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    made = Simulation()
    yield made
    made.close()


def in_a_process_of_its_own(hash_seed: str, first: int, schedules: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.tools.simulation", f"--seed={first}", f"--schedules={schedules}", "--trace"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_seed_gives_the_same_trace(simulation: Simulation) -> None:
    with in_a_process_of_its_own("1", SEED, SCHEDULES) as one, in_a_process_of_its_own("2", SEED, SCHEDULES) as other:
        there, elsewhere = one.communicate()[0], other.communicate()[0]
    here = {seed: simulation.run(seed, trace=True).trace for seed in reversed(range(SEED, SEED + SCHEDULES))}
    assert there == elsewhere
    assert there.splitlines() == [line for seed in sorted(here) for line in here[seed]]
    assert len(there) > 10_000
