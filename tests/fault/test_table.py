"""The table and `verified` tell what went wrong: they can fail."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.databases import ROOT

from fault.table import Tally
from fault.verified import verified
from ops.bench.stored import play
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

pytestmark = pytest.mark.long

TESTS = """
import pytest

@pytest.mark.fault(9, "nine")
@pytest.mark.parametrize("seconds", [0.25, 1.5])
def test_sound(tally, seconds):
    tally.tried += 2
    tally.acknowledged += 10
    tally.recovered(seconds)

@pytest.mark.fault(1, "one")
def test_lost(tally):
    tally.tried += 1
    tally.lost += 1

@pytest.mark.fault(1, "one")
def test_broken(tally):
    tally.tried += 1
    tally.doubled += 3
    raise ValueError

@pytest.mark.fault(2, "two")
def test_idle(tally):
    pass

@pytest.mark.fault(3, "three")
def test_uncounted():
    pass

def test_unmarked(tally):
    pass
"""

TABLE = """
fault  what  tried  acknowledged  lost  doubled  slowest recovery
    1  one       2             0     1        3                 -
    2  two       0             0     0        0                 -
    9  nine      4            20     0        0            1.50 s
"""


def test_what_tests_counted_is_one_table(tmp_path: Path) -> None:
    """Whichever process counted it."""
    (tmp_path / "test_some.py").write_text(TESTS)
    plain = [
        option for name in ("cacheprovider", "schemathesis", "hypothesispytest") for option in ("-p", f"no:{name}")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "fault.table", *plain, "-c", os.devnull]
    done = subprocess.run(
        [*command, "-n", "2", str(tmp_path / "test_some.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert TABLE in done.stdout, done.stdout + done.stderr
    assert "5 failed, 2 passed" in done.stdout
    for name in ("lost", "broken", "idle", "uncounted", "unmarked"):
        assert f"::test_{name}" in done.stdout


def test_a_turn_that_is_not_there_is_lost(tmp_path: Path) -> None:
    with SimulatorProcess() as engine, ServerProcess(tmp_path, upstreams=[engine.base_url]) as server:
        [session_id] = asyncio.run(play(server.base_url, sessions=1, turns=2))
    sqlite_url = server.environment["TURNLOG_DATABASE_URL"]
    there = Acknowledged(session_id, 1)
    tally = Tally()
    verified(sqlite_url, [there], tally)
    assert (tally.acknowledged, tally.lost) == (1, 0)
    with pytest.raises(AssertionError):
        verified(sqlite_url, [there, Acknowledged(session_id, 99), Acknowledged("never-seen", 1)], tally)
    assert (tally.acknowledged, tally.lost) == (4, 2)
    with pytest.raises(AssertionError):
        verified(sqlite_url, [there, Acknowledged(session_id, 2, retry_key="another")], tally)
    assert (tally.acknowledged, tally.lost) == (6, 3)
