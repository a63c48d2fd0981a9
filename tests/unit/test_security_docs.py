"""The table of threats in tests/README.md and the tests that are marked with them are the same."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
MARK = "pytest.mark" + ".threat"
DOCUMENT = TESTS / "README.md"


def table() -> dict[str, list[str]]:
    """By threat the tests of its row."""
    text = DOCUMENT.read_text().partition("| threat | defence |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines()[2:]]
    return {row[0].strip(): re.findall(r"`([^`]+)`", row[2]) for row in rows}


def texts() -> dict[str, str]:
    """The source of every test file, by its name: those are unique."""
    return {file.name: file.read_text() for file in TESTS.rglob("test_*.py")}


def marks() -> dict[str, set[str]]:
    """By threat the tests that have its mark."""
    found = defaultdict(set)
    for name, text in texts().items():
        for function in ast.parse(text).body if MARK in text else ():
            for decorator in getattr(function, "decorator_list", ()):
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == MARK:
                    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
                    found[ast.literal_eval(decorator.args[0])].add(f"{name}::{function.name}")
    return found


def test_every_threat_has_a_row_and_every_mark_a_threat() -> None:
    rows, marked = table(), marks()
    assert len(rows) > 30
    assert set(marked) <= set(rows)
    for threat, tests in marked.items():
        missing = tests - set(rows[threat])
        assert not missing, (threat, missing)


def test_every_row_names_tests_that_there_are() -> None:
    known = texts()
    for threat, tests in table().items():
        assert tests, threat
        for one in tests:
            file, _, function = one.partition("::")
            assert f"def {function}" in known[file], one
