"""The tool that makes faults: what each pattern makes of a small file, and that the list's faults are still there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.mutants import sql
from tests.tools.mutants.copies import Copy
from tests.tools.mutants.edits import mutants_of
from tests.tools.mutants.families import Family, Outcome, run
from tests.tools.mutants.listed import Listed, find, read_list
from tests.tools.mutants.reach import callers
from tests.tools.mutants.results import add, is_wanted, read_results, report

ROOT = Path(__file__).resolve().parents[2]

SMALL = '''
"""A file."""

_TEXT = """
UPDATE things SET version = version + 1, kind = ?3
WHERE name = ?1 AND version < ?2 -- AND not this
"""
held = select(things.c.id).where(things.c.fence == given.fence, ~dead).order_by(things.c.id).with_for_update()


class Write:
    durable: ClassVar[bool] = True

    def apply(self, tx, most=1):
        """Write."""
        if self.known is None or not self.opened:
            raise ValueError(f"{self.known == 1} is not known")
        log.warning("it is %s", self.known == 2)
        tx.lock(held, {"sid": self.sid, "fence": self.fence})
        tx.run(held, Known(self.version))
        self.count = min(most, 2)
        return self.rows[0] if self.count < 3 else sorted(self.rows)
'''


def made(pattern: str) -> list[str]:
    return [f"{one.before} → {one.after}" for one in mutants_of("small.py", SMALL) if one.pattern == pattern]


@pytest.mark.parametrize(
    ("pattern", "faults"),
    [
        ("operand", ["self.known is None or not self.opened → not self.opened",
                     "self.known is None or not self.opened → self.known is None"]),
        ("where", ["where(things.c.fence == given.fence) → nothing", "where(~dead) → nothing"]),
        ("not", ["~dead → dead", "not self.opened → self.opened"]),
        ("order", ["order_by(things.c.id) → nothing", "sorted(self.rows) → list(self.rows)"]),
        ("lock", ["with_for_update() → nothing"]),
        ("constant", ["durable: ClassVar[bool] = True → False"]),
        ("default", ["most = 1 → 2"]),
        ("guard", ["if self.known is None or not self.opened: … raise ValueError → nothing"]),
        ("write", ["tx.lock(held, {'sid': self.sid, 'fence': self.fence}) → nothing",
                   "tx.run(held, Known(self.version)) → nothing"]),
        ("state", ["self.count = min(most, 2) → nothing"]),
        ("values", ["'sid': self.sid → nothing", "'fence': self.fence → nothing"]),
        ("field", ["Known(version: self.version) → 0"]),
        ("function", ["min(most, 2) → max(most, 2)"]),
        ("number", ["self.rows[0] → self.rows[1]", "self.count < 3 → self.count < 4"]),
        ("call", []),
    ],
)  # fmt: skip
def test_a_pattern_makes_these_faults(pattern: str, faults: list[str]) -> None:
    assert sorted(made(pattern)) == sorted(faults)


def test_messages_and_what_is_logged_are_left_alone() -> None:
    assert [fault for fault in made("comparison") if "known == " in fault] == []


def test_neighbours_change_places() -> None:
    assert [fault.split(";")[0] for fault in made("swap")] == [
        "tx.lock(held, {'sid': self.sid, 'fence': self.fence})",
        "tx.run(held, Known(self.version))",
    ]


def test_sql_that_is_text_loses_conditions_columns_and_more() -> None:
    assert made("text") == [
        "WHERE name = ?1 → nothing",
        "AND version < ?2 → nothing",
        "SET version = version + 1 → nothing",
        "SET kind = ?3 → nothing",
        "WHERE name = ?1 AND version < ?2 → < → <=",
        "UPDATE things SET version = version + 1, kind = ?3 → + 1 → nothing",
    ]
    for text, *_ in sql.changes("DELETE FROM things WHERE name = ? AND version = ?"):
        assert text.count("?") == 2


def test_a_fault_changes_its_lines_alone() -> None:
    for one in mutants_of("small.py", SMALL):
        changed = one.applied(SMALL)
        ast.parse(changed)
        before, after = SMALL.splitlines(), changed.splitlines()
        assert before[: one.first - 1] == after[: one.first - 1]
        behind = len(before) - one.last
        assert before[-behind:] == after[-behind:] or not behind
        assert changed != SMALL


def test_a_fault_is_found_again_in_code_that_has_moved(tmp_path: Path) -> None:
    folder = tmp_path / "app/turn"
    folder.mkdir(parents=True)
    (folder / "retries.py").write_text("def f(a, b):\n    return a < b\n")
    listed = [
        Listed("app/turn/retries.py:f:comparison:1", "retries", "a < b", "a <= b"),
        Listed("app/turn/retries.py:g:comparison:4", "retries", "a < b", "a <= b"),
        Listed("app/turn/retries.py:f:comparison:2", "retries", "a > b", "a >= b"),
    ]
    found = list(find(listed, tmp_path).values())
    assert [one and one.id for one in found] == [listed[0].id, listed[0].id, None]


def test_the_lists_faults_are_still_there() -> None:
    """Of those that are not, `--run` names each; where code is rewritten the list is made anew, and compared."""
    listed = read_list()
    gone = [name for name, one in find(listed, ROOT).items() if one is None]
    assert len(listed) >= 150
    assert gone == []


def test_what_stands_outside_of_functions_is_run_by_those_that_use_it() -> None:
    def users(name: str) -> set[str]:
        [mutant] = [one for one in found if one.id == name]
        return callers(mutant, ROOT)

    path = "app/store/statements.py"
    found = list(mutants_of(path, (ROOT / path).read_text()))
    assert users(f"{path}:_fenced:operand:1") == {f"{path} _fenced"}
    assert users(f"{path}:drop_staged_chunks:where:1") == {
        "app/store/log_turns.py Release.apply",
        "app/store/log.py abandon",
    }


@pytest.fixture(scope="module")
def copy() -> Iterator[Copy]:
    made = Copy(ROOT)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("code", "how", "what"),
    [
        ("print('seed 7 failed', flush=True); waits()", "found", "7"),
        ("waits()", "hangs", ""),
        ("print(undefined)", "broken", "NameError: name 'undefined' is not defined"),
        ("pass", "passed", ""),
    ],
)
def test_a_family_runs_until_its_first_failure(copy: Copy, code: str, how: str, what: str) -> None:
    waits = "waits = lambda: __import__('time').sleep(600)"
    family = Family(("-c", f"{waits}\n{code}"), 1.0, r"^seed (\d+) failed")
    outcome = run(family, copy, seeds=range(1, 2), modules=None)
    assert (outcome.how, outcome.what) == (how, what)


def test_a_fault_is_in_the_copy_alone(copy: Copy) -> None:
    path = "app/turn/retries.py"
    source = (ROOT / path).read_text()
    mutant = next(mutants_of(path, source))
    with copy.broken(mutant):
        assert (copy.root / path).read_text() == mutant.applied(source)
        assert (ROOT / path).read_text() == source
    assert (copy.root / path).read_text() == source


def test_results_continue_where_they_end(tmp_path: Path) -> None:
    file = tmp_path / "results.txt"
    listed = [Listed(name, "store", "a", "b") for name in ("one", "two", "three")]
    add(file, "one", "simulation", Outcome("passed", 20.0, "25"))
    add(file, "one", "unit", Outcome("found", 2.0, "tests/unit/test_a.py::test_b"))
    add(file, "two", "simulation", Outcome("hangs", 300.0, ""))
    results = read_results(file)
    wanted = [one.id for one in listed if is_wanted(results[one.id], "simulation", 25, unfound=False)]
    assert wanted == ["three"]
    assert is_wanted(results["one"], "simulation", 100, unfound=False)
    assert not is_wanted(results["one"], "contract", 0, unfound=True)
    lines = list(report(listed, results))
    assert "all | 2 | 1 | 0 | 1 | 0 | 0 | 0" in lines
