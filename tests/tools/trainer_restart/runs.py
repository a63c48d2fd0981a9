"""Runs a trainer in a process of its own, kills and restarts it, and compares what it trained on."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ops.server import ROOT, ServerProcess
from ops.simulator.process import SimulatorProcess

Steps = list[list[list[Any]]]
"""The samples of each step."""


class Compared(msgspec.Struct, frozen=True):
    """Of the samples of a whole run: how many another run has at the same step, lacks, and has besides."""

    same: int
    missing: int
    extra: int

    @property
    def is_same(self) -> bool:
        return not self.missing and not self.extra

    def __str__(self) -> str:
        return f"{self.same} the same, {self.missing} missing, {self.extra} other"


def compare(whole: Steps, other: Steps) -> Compared:
    wanted = Counter((step, *sample) for step, samples in enumerate(whole) for sample in samples)
    found = Counter((step, *sample) for step, samples in enumerate(other) for sample in samples)
    return Compared((wanted & found).total(), (wanted - found).total(), (found - wanted).total())


def run(
    folder: Path,
    steps: int,
    dies_at: tuple[int, str] | None,
    *,
    restores: bool = True,
    database_url: str | None = None,
) -> Steps:
    """The samples of a trainer that is killed at a step and place, if any, and then started again."""
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
    command: Sequence[str] = (
        *(sys.executable, "-m", "tests.tools.trainer_restart", "--url", url, "--folder", str(folder)),
        *("--steps", str(steps), *arguments),
    )
    return subprocess.run(command, cwd=ROOT, check=False).returncode
