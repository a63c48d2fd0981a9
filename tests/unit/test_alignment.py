"""Rollouts beside each other: which steps share a row, and where one differs first, in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnlog.alignment import LEAST_SAME, START, Step, add_turn, align, changed, first_difference, table

Turn = tuple[str, str]
"""What it does, `tool argument` or a text with a full stop, and what came back; empty for nothing."""


def steps(*turns: Turn | str, task: str = "Fix it.") -> list[Step]:
    made, brought = [START], [{"role": "user", "content": task}]
    for number, turn in enumerate(turns, 1):
        did, result = turn if isinstance(turn, tuple) else (turn, "ok")
        add_turn(made, number, [*brought, reply(did, number)], "unread")
        brought = [{"role": "tool", "tool_call_id": f"call-{id(made)}-{number}", "content": result}]
    return made


def told(one: list[Step], other: list[Step]) -> str | None:
    return first_difference(one, other, align(one, other), "a", "b")


def reply(did: str, number: int) -> dict[str, Any]:
    if did.endswith("."):
        return {"role": "assistant", "content": did}
    tool, _, argument = did.partition(" ")
    function = {"name": tool, "arguments": json.dumps({"command": argument}, indent=number)}
    return {
        "role": "assistant",
        "content": f"Turn {number}:",
        "tool_calls": [{"id": f"c{number}", "function": function}],
    }


def pairs(one: list[Step], other: list[Step]) -> str:
    """The turns in each row but the task's, `1-1 2- -2`."""
    return " ".join(f"{i or ''}-{j or ''}" for i, j in align(one, other)[1:])


A = ("bash ls", "bash pytest -q", "edit a.py", "Done.")


@pytest.mark.parametrize(
    ("one", "other", "expected", "words"),
    [
        (A, A, "1-1 2-2 3-3 4-4", None),
        (
            A,
            (A[0], "bash cat setup.py", *A[1:]),
            "1-1 -2 2-3 3-4 4-5",
            "After step 1: b calls `bash: cat setup.py` in addition",
        ),
        (A, ("bash cat a", *A), "-1 1-2 2-3 3-4 4-5", "At first: b calls `bash: cat a` in addition"),
        (A, (A[0], *A[2:]), "1-1 2- 3-2 4-3", "Step 2: a calls `bash: pytest -q` in addition"),
        (
            A,
            (A[0], "bash pytest -x", *A[2:]),
            "1-1 2-2 3-3 4-4",
            "Step 2: b calls `bash: pytest -x` where a calls `bash: pytest -q`",
        ),
        (A, (*A[:2], "search a", A[3]), "1-1 2-2 3- -3 4-4", "Step 3: b calls `search: a` where a calls `edit: a.py`"),
        (A, (*A[:3], "Ready."), "1-1 2-2 3-3 4-4", "Step 4: b answers “Ready.” where a answers “Done.”"),
        (A, (*A[:3], "bash ls"), "1-1 2-2 3-3 4- -4", "Step 4: b calls `bash: ls` where a answers “Done.”"),
        (A, A[:2], "1-1 2-2 3- 4-", "Step 3: b has ended where a calls `edit: a.py`"),
        (A[:2], A, "1-1 2-2 -3 -4", "After step 2: b calls `edit: a.py` where a has ended"),
        (
            A,
            (A[0], ("bash pytest -q", "1 failed"), *A[2:]),
            "1-1 2-2 3-3 4-4",
            "Step 2: b gets “1 failed” where a gets “ok”",
        ),
        (
            A,
            (A[0], ("bash pytest -q", "ok\nthough"), *A[2:]),
            "1-1 2-2 3-3 4-4",
            "Step 2: b gets “ok …” where a gets “ok”",
        ),
        (("Yes.\n1.",), ("Yes.\n2.",), "1-1", "Step 1: b answers “Yes. …”, like a, but continues differently"),
        ((), ("bash ls",), "-1", "At first: b calls `bash: ls` where a has ended"),
        ((), (), "", None),
    ],
)
def test_steps_are_matched_by_what_they_do(
    one: tuple[Turn | str, ...], other: tuple[Turn | str, ...], expected: str, words: str | None
) -> None:
    """Ids of calls, blanks in arguments and the text beside a call do not count."""
    assert pairs(steps(*one), steps(*other)) == expected
    assert told(steps(*one), steps(*other)) == words


def test_a_task_and_what_is_not_there_differ() -> None:
    other = steps(*A, task="Add it.")
    assert told(steps(*A), other) == "Task: b is asked “Add it.” where a is asked “Fix it.”"
    gone = [START]
    add_turn(gone, 1, [], "turn 1 of b")
    said = "Step 1: b does what cannot be read where a calls `bash: ls`"
    assert told(steps(*A), gone) == said
    assert told(gone, gone) is None


def test_calls_at_once_are_compared_one_by_one() -> None:
    both = [START]
    calls = [reply(did, 1)["tool_calls"][0] for did in A[:2]]
    add_turn(both, 1, [{"role": "user", "content": "Fix it."}, {**reply(A[0], 1), "tool_calls": calls}], "unread")
    one = steps(A[0])
    assert told(one, both) == "Step 1: b calls `bash: pytest -q` where a calls no more"


DID = st.lists(st.sampled_from([*A, "bash cat b", "search a", "Ready."]), max_size=9)


def longest(one: list[str], other: list[str]) -> int:
    """The length of the longest common subsequence, as the textbook has it."""
    row = [0] * (len(other) + 1)
    for item in one:
        above = row
        row = [0]
        for at, each in enumerate(other):
            row.append(above[at] + 1 if item == each else max(row[at], above[at + 1]))
    return row[-1]


@given(DID, DID)
def test_every_step_is_there_once_and_as_many_as_can_be_are_matched(one: list[str], other: list[str]) -> None:
    a, b = steps(*one), steps(*other)
    rows = align(a, b)
    assert [i for i, _ in rows if i is not None] == list(range(len(a)))
    assert [j for _, j in rows if j is not None] == list(range(len(b)))
    beside = [(a[i], b[j]) for i, j in rows if i is not None and j is not None]
    assert all(left.tools == right.tools for left, right in beside)
    same = [(left.turn, right.turn) for left, right in beside if left.did == right.did]
    assert len(same) == longest(one, other) + 1  # and the task
    back = [(a[i], b[j]) for j, i in align(b, a) if i is not None and j is not None]
    if len(a) != len(b):
        assert same == [(left.turn, right.turn) for left, right in back if left.did == right.did]


@given(DID, st.integers(0, 9))
def test_one_step_more_is_one_gap(did: list[str], at: int) -> None:
    longer = [*did[:at], "bash cat setup.py", *did[at:]]
    rows = align(steps(*did), steps(*longer))
    assert [j for i, j in rows if i is None] == [min(at, len(did)) + 1]
    assert None not in [j for _, j in rows]


@given(DID, st.lists(DID, max_size=3))
def test_a_table_has_the_rows_of_each_pair(first: list[str], others: list[list[str]]) -> None:
    """But for gaps in both, which another column's steps make."""
    a, all_others = steps(*first), [steps(*other) for other in others]
    rows = table(len(a), [align(a, other) for other in all_others])
    for column, other in enumerate(all_others, 1):
        pair = [(row[0], row[column]) for row in rows if (row[0], row[column]) != (None, None)]
        assert pair == align(a, other)
    assert [row[0] for row in rows if row[0] is not None] == list(range(len(a)))


@given(st.text("ab \n."), st.text("ab \n."))
def test_the_parts_of_a_text_are_the_text(text: str, other: str) -> None:
    parts = changed(text, other)
    assert "".join(part for _, part in parts) == text
    assert changed(text, text) == [(False, text)][: len(text)]
    same = sum(len(part) for is_new, part in parts if not is_new)
    assert same >= LEAST_SAME * max(len(text), len(other)) or len(parts) <= 1


def test_what_is_new_in_a_text_is_marked() -> None:
    assert changed("3 passed, 1 failed", "4 passed, 1 failed") == [(True, "3"), (False, " passed, 1 failed")]
    lines = [f"{at} {at % 7}" for at in range(4_000)]
    other = "\n".join(["new", *lines[:2_000], *lines[2_001:], ""])
    assert changed(other, "\n".join([*lines, ""])) == [(True, "new\n"), (False, other[4:])]
