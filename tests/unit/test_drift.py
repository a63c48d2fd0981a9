"""What trainers need, and what the lane that tries their newest versions writes down."""

from __future__ import annotations

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
