"""The tool that makes faults: those of its list are still there, are in a copy alone, and what finds them is told."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.mutants.__main__ import add, is_wanted, read_results, report
from tests.tools.mutants.faults import Copy, Fault, Outcome, read_list, run

ROOT = Path(__file__).resolve().parents[2]


def test_the_lists_faults_are_still_there() -> None:
    """Where a line of code is rewritten, its faults are put into the new one."""
    listed = read_list()
    sources = {path: (ROOT / path).read_text() for path in {one.path for one in listed}}
    assert len({one.id for one in listed}) == len(listed) >= 150
    assert [one.id for one in listed if sources[one.path].count(one.before) != 1] == []
    meant = {path: ast.dump(ast.parse(source)) for path, source in sources.items()}
    for one in listed:
        assert ast.dump(ast.parse(one.applied(sources[one.path]))) != meant[one.path], one.id


@pytest.fixture(scope="module")
def copy() -> Iterator[Copy]:
    made = Copy(ROOT)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("code", "how", "what"),
    [
        ("print('seed 7 failed', flush=True); waits()", "found", "7"),
        ("print('FAILED tests/test_a.py::test_b - why', flush=True); waits()", "found", "tests/test_a.py::test_b"),
        ("waits()", "hangs", ""),
        ("print(undefined)", "broken", "NameError: name 'undefined' is not defined"),
        ("pass", "passed", ""),
    ],
)  # fmt: skip
def test_a_command_runs_until_its_first_failure(copy: Copy, code: str, how: str, what: str) -> None:
    waits = "waits = lambda: __import__('time').sleep(600)"
    outcome = run([sys.executable, "-c", f"{waits}\n{code}"], copy, 1.0)
    assert (outcome.how, outcome.what) == (how, what)


def test_a_fault_is_in_the_copy_alone(copy: Copy) -> None:
    fault = read_list()[0]
    source = (ROOT / fault.path).read_text()
    with copy.broken(fault):
        assert (copy.root / fault.path).read_text() == fault.applied(source) != source
        assert (ROOT / fault.path).read_text() == source
    assert (copy.root / fault.path).read_text() == source


def test_results_continue_where_they_end(tmp_path: Path) -> None:
    file = tmp_path / "results.txt"
    one, two, three = listed = [Fault("app/a.py", "store", name, "") for name in ("one", "two", "three")]
    add(file, one.id, "simulation", Outcome("passed", 20.0))
    add(file, one.id, "unit", Outcome("found", 2.0, "tests/unit/test_a.py::test_b"))
    add(file, two.id, "simulation", Outcome("passed", 300.0))
    results = read_results(file)
    assert [fault for fault in listed if is_wanted(results[fault.id], "simulation", unfound=False)] == [three]
    assert [fault for fault in listed if is_wanted(results[fault.id], "contract", unfound=True)] == [two, three]
    assert list(report(listed, results)) == [
        "1 of 2 faults found; 3 are on the list",
        "store: 1 of 2",
        "simulation: finds 0 of 2",
        "unit: finds 1 of 1",
        f"found by none: {two.id}",
    ]
