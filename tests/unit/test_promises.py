"""The tables of tests/README.md: every promise, page and fault has tests, and they exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
PROMISES_NOTHING = {"README.md", "benchmarks.md", "comparison.md", "dependencies.md"}

FILES = sorted(TESTS.rglob("test_*.py"))


def rows(section: str) -> dict[str, list[str]]:
    """By each row's first cell, the tests that it names."""
    text = (TESTS / "README.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: re.findall(r"test_\w+\.py", row[-1]) for row in cells[2:]}


def test_every_promise_and_page_has_tests() -> None:
    promised = (ROOT / "README.md").read_text().partition("## What is promised")[2].partition("\n## ")[0]
    assert list(rows("By promise")) == re.findall(r"^- \*\*(.+?)\*\*", promised, re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(rows("By page")) == pages - PROMISES_NOTHING


def test_every_row_names_tests_that_exist() -> None:
    for section in ("By promise", "By page", "By fault"):
        for name, tests in rows(section).items():
            assert tests, name
            assert set(tests) <= {path.name for path in FILES}, name


def marks(path: Path) -> Iterator[str]:
    """The numbers of the faults that a module's tests do."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.fault"):
            yield ast.unparse(node.args[0])


def test_the_table_of_faults_is_that_of_the_marks() -> None:
    marked: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for number in marks(path):
            marked[number].add(path.name)
    assert {number: set(tests) for number, tests in rows("By fault").items()} == marked
    assert sorted(map(int, marked)) == list(range(1, 21))
