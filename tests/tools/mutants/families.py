"""The families of tests that look for faults, each a command with a limit of time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.tools.mutants.copies import Copy

MARK = "MUTANTS_JOB"
"""A variable of all processes of a run, by which those are found that it has left behind."""

LOOK_S = 0.2

PYTEST = ("-m", "pytest", "-x", "--no-header", "--tb=no")
_FAILED = r"^(?:FAILED|ERROR) (\S+)"


class Family(NamedTuple):
    """`{}` in the command stand for the first seed and the number of schedules. `tests`: the modules of which those are
    run that reach the fault. What the first group of `found` matches in the output is what found it."""

    command: tuple[str, ...]
    limit_s: float
    found: str
    tests: str | None = None

    def on(self, copy: Copy, seeds: range, modules: Sequence[str] | None) -> list[str]:
        """The command in a copy; without `modules` all are run."""
        given = iter((seeds.start, len(seeds)))
        command = [str(next(given)) if part == "{}" else part for part in self.command]
        if self.tests is not None:
            command += sorted(map(str, copy.root.glob(self.tests))) if modules is None else modules
        return [sys.executable, *command]


def _pytest(tests: str, limit_s: float, *options: str, chosen: bool = True) -> Family:
    if chosen:
        return Family((*PYTEST, *options), limit_s, _FAILED, tests)
    return Family((*PYTEST, *options, tests), limit_s, _FAILED)


_SIMULATION = ("-m", "tests.tools.simulation", "--seed", "{}", "--schedules", "{}")
_SEED = r"(?:^|schedule with )seed (\d+)"

FAMILIES: dict[str, Family] = {
    "simulation": Family(_SIMULATION, 300.0, _SEED),
    "simulation-postgresql": Family((*_SIMULATION, "--store", "postgresql"), 900.0, _SEED),
    "claim mutants": _pytest("tests/unit/test_claim_mutants.py", 60.0, chosen=False),
    "tree properties": _pytest("tests/unit/test_tree_properties.py", 120.0, chosen=False),
    "unit": _pytest("tests/unit/test_*.py", 120.0),
    "contract": _pytest("tests/contract/test_*.py", 240.0),
    "contract-postgresql": _pytest("tests/contract/test_*.py", 300.0, "--long", "-k", "postgresql"),
    "integration": _pytest("tests/integration/test_*.py", 400.0),
    "fault": _pytest("tests/fault/test_*.py", 400.0),
}


class Outcome(NamedTuple):
    """`how`: "found", "hangs" (which counts as found), "passed", "broken" (nothing starts: any test finds that), or
    "unreached" (no test runs the line). `what`: the seed or the test that found it, the last seed that passed, or the
    error with which nothing starts."""

    how: str
    seconds: float
    what: str

    @property
    def schedules(self) -> int:
        """How many schedules passed."""
        return int(self.what) if self.how == "passed" and self.what else 0


def run(family: Family, copy: Copy, *, seeds: range, modules: Sequence[str] | None) -> Outcome:
    """Run a family in a copy until its first failure. `modules`: the test modules to run, None for all."""
    if modules is not None and not modules:
        return Outcome("unreached", 0.0, "")
    command = family.on(copy, seeds, modules)
    mark = uuid.uuid4().hex
    environment = {**os.environ, "PYTHONPATH": str(copy.root), "TMPDIR": str(copy.scratch), MARK: mark}
    began = time.monotonic()
    output = copy.base / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=copy.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        outcome = _outcome(family, process, output, began)
        is_seeded = outcome.how == "passed" and family.tests is None and "{}" in family.command
        return outcome._replace(what=str(seeds.stop - 1)) if is_seeded else outcome
    finally:
        end_all(mark)
        process.wait()
        copy.clear()


def _outcome(family: Family, process: subprocess.Popen[bytes], output: Path, began: float) -> Outcome:
    found = re.compile(family.found, re.MULTILINE)
    while True:
        code = process.poll()
        seconds = round(time.monotonic() - began, 1)
        text = output.read_text(errors="replace")
        seen = found.search(text)
        if seen is not None:
            return Outcome("found", seconds, seen[1])
        if code == 0 or (code == 5 and family.tests is not None):
            return Outcome("passed" if code == 0 else "unreached", seconds, "")
        if code is not None:
            last = text.strip().splitlines()[-1:] or [f"exit {code}"]
            return Outcome("broken", seconds, " ".join(last[0].split())[:80])
        if seconds > family.limit_s:
            return Outcome("hangs", seconds, "")
        time.sleep(LOOK_S)


def end_all(mark: str) -> None:
    """Kill every process of a run: also servers and databases that their tests have not stopped."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue  # It has ended, or is another user's.
