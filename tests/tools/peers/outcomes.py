"""What a peer's tests came to with Turnlog in the place of the peer's server."""

from __future__ import annotations

import sys

import pytest


class Outcomes:
    """A pytest plugin: a line for each test that does not hold, and the sum."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            why = "" if report.passed else str(getattr(report.longrepr, "reprcrash", None) or report.longrepr)
            self.found.setdefault(report.nodeid, (report.outcome, why))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.found[report.nodeid] = ("failed", str(report.longrepr)[-300:])

    def lines(self) -> list[str]:
        tested = [outcome for outcome, _ in self.found.values()]
        rest = [
            f"{outcome} {name.rpartition('/')[2]}: {' '.join(why.split())[-200:]}"
            for name, (outcome, why) in self.found.items()
            if outcome != "passed"
        ]
        return [*rest, f"{tested.count('passed')} of {len(tested)} hold"]


def run(files: list[str], root: str, options: list[str], *fixtures: object) -> None:
    """Run the tests of a checkout without its and our configuration, and print what they came to."""
    outcomes = Outcomes()
    alone = ["--noconftest", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", root, "-q", "--tb=short"]
    pytest.main([*alone, *files, *options], plugins=[outcomes, *fixtures])
    print("\n".join(outcomes.lines()))


def forget_our_tests() -> None:
    """Let `tests` be found anew: the checkout's package has the same name as ours."""
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]
