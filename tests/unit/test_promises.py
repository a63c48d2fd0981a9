"""The tables of tests/README.md: each row has tests that exist, and that `.ci/run` runs."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from app.protocols.registry import PROTOCOLS
from tests.tools.exercised import DATABASES, ON_BOTH, SECTIONS, missed, rows

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
PROMISES_NOTHING = {"README.md", "benchmarks.md", "comparison.md", "decisions.md", "dependencies.md"}

FILES = sorted(TESTS.rglob("test_*.py"))

ELSEWHERE = re.compile(
    r"(?<!marks=pytest\.)mark\.(untimed|real_engine|real_sglang|harness)\b|importorskip\((?!'(pyarrow|deno|transformers))"
)
"""What puts a test out of both lanes, or skips it on a fresh clone."""


def test_every_promise_and_page_has_tests() -> None:
    promised = (ROOT / "README.md").read_text().partition("## What is promised")[2].partition("\n## ")[0]
    assert list(rows("By promise")) == re.findall(r"^- \*\*(.+?)\*\*", promised, re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(rows("By page")) == pages - PROMISES_NOTHING


def test_every_row_names_tests_that_exist_and_one_that_a_lane_of_ci_runs() -> None:
    """Where all is untimed, or needs a package or a program that `ops/setup dev` does not bring, none is run."""
    listed = {(section, name): tests for section in SECTIONS for name, tests in rows(section).items()}
    modules = {test.partition("::")[0] for tests in listed.values() for test in tests}
    there = {name: runs for path in FILES if path.name in modules for name, runs in named_in(path)}
    for row, tests in listed.items():
        assert set(tests) <= there.keys(), row
        assert any(there[test] for test in tests), row


def test_what_was_not_run_is_missed() -> None:
    every = [f"tests/unit/{test}[/a/b]" for section in SECTIONS for tests in rows(section).values() for test in tests]
    both = [f"tests/{folder}/test_a.py::test_b[{kind}]" for folder in ON_BOTH for kind in DATABASES]
    assert list(missed([*every, *both])) == []
    assert list(missed([*every, *both[1:]])) == ["tests/contract on sqlite"]
    without = [one for one in every if "test_promises" not in one and "test_one_owner" not in one]
    assert list(missed([*without, *both])) == ["By fault: 16"]


def test_every_protocol_has_tests() -> None:
    assert set(rows("By protocol")) == set(PROTOCOLS)


def named_in(path: Path) -> Iterator[tuple[str, bool]]:
    """A module and its tests, and whether the quick or the long lane runs them on a fresh clone."""
    tree = ast.parse(path.read_text())
    heads = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign | ast.Expr)]
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    runs = {
        f"{path.name}::{node.name}": not any(map(ELSEWHERE.search, [*heads, *map(ast.unparse, node.decorator_list)]))
        for node in tests
        if node.name.startswith("test_")
    }
    yield path.name, any(runs.values())
    yield from runs.items()


def marks(path: Path) -> Iterator[str]:
    """The numbers of the faults that a module's tests do."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "mark.fault" in text else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.fault"):
            yield ast.unparse(node.args[0])


def test_the_table_of_faults_is_that_of_the_marks() -> None:
    marked: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for number in marks(path):
            marked[number].add(path.name)
    assert {number: set(tests) for number, tests in rows("By fault").items()} == marked
    assert sorted(map(int, marked)) == list(range(1, 21))
