"""The table of threats in tests/README.md and the tests that are marked with them are the same."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.tools.exercised import rows

TESTS = Path(__file__).resolve().parents[1]
MARK = "pytest.mark" + ".threat"


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
    listed, marked = rows("By threat"), marks()
    assert len(listed) > 30
    assert set(marked) <= set(listed)
    for threat, tests in marked.items():
        missing = tests - set(listed[threat])
        assert not missing, (threat, missing)
