"""What trainers need, and what the lane that tries their newest versions writes down."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ops.server import ROOT
from tests.tools import drift


def test_the_page_is_current() -> None:
    """`python -m tests.tools.drift --table` writes it anew."""
    page = drift.PAGE.read_text()
    assert drift.filled(page, drift.results()) == page
    assert "not tried" not in drift.filled(
        page, {name: drift.Result("9", "passed 1", 1, "") for name in drift.trainers()}
    )


def test_each_test_of_a_trainer_is_in_the_lane() -> None:
    listed = {path for trainer in drift.trainers().values() for path in trainer.tests}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "trainers").glob("test_*.py")}
    assert there <= listed


@pytest.mark.parametrize(
    ("test", "result"),
    [
        ("def test(): pass", "passed 2"),
        ("def test(): assert False", "passed 0, failed 2, skipped 0: test "),
        ("import pytest\ndef test(): pytest.skip('no GPU')", "passed 0, failed 0, skipped 2: test no GPU"),
        ("", "passed 0, failed 0, skipped 0: no test ran"),
        ("import os\ndef test(): os._exit(0)", "passed 0, failed 2, skipped 0: pytest ended with code 0"),
        (
            "def test(request): assert not request.config.option.long or __import__('os')._exit(9)",
            "passed 1, failed 1, ",
        ),
    ],
)
def test_a_lane_that_dies_or_skips_has_not_passed(
    tmp_path: Path, test: str, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which takes longer than the tests
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--long', action='store_true')"
    )
    (tmp_path / "test_it.py").write_text(test)
    trainer = drift.Trainer("1", [], [str(tmp_path / "test_it.py")], "page", "line", "runs")
    assert drift.tried(python, trainer).startswith(result)
