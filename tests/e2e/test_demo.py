"""The README's first command, as far as it runs here: the story it tells must end well."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ops.server import ROOT

pytestmark = pytest.mark.long


def test_the_demo_ends_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ops.demo"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
