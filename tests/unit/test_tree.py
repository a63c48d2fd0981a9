"""A tree of turns: where requests attach, what branches are, and which rows and payloads they have."""

from __future__ import annotations

import msgspec
import pytest
from making import Book, assistant, user

from app.domain.branches import Branches, Loss, branch_rows
from app.domain.events import TurnCommitted
from app.domain.rules import superseded
from app.domain.session import fold

A, B, C, D = user("a"), user("b"), user("c"), user("d")
X, Y, Z = assistant("x"), assistant("y"), assistant("z")


def tree(window: int = 1) -> Book:
    return Book(window, history="tree")


def test_branches_of_copies_are_those_that_would_be_decided() -> None:
    book = Book(3, "segment")
    book.turn([A], X)
    book.turn([A, X, B], Y)
    book.turn([A, X, B], Z)
    book.turn([A, X, C], Z)
    book.turn([A, X, C, Z, D], Y, prompt=[7])
    book.turn([D], Y)
    old = [
        msgspec.structs.replace(
            recorded, event=msgspec.structs.replace(recorded.event, branch=None, branch_cause=None, carries=None)
        )
        if isinstance(recorded.event, TurnCommitted)
        else recorded
        for recorded in book.events
    ]
    derived = fold("s", old)
    assert derived is not None
    assert [(turn.branch, turn.branch_cause) for turn in derived.turns] == [
        (turn.branch, turn.branch_cause) for turn in book.session.turns
    ]


@pytest.mark.parametrize(("body", "agent_id", "gone"), [("00", None, {2}), ("01", None, set()), ("00", "k", set())])
def test_a_turn_is_superseded_by_the_same_request_once_that_has_a_child(
    body: str, agent_id: str | None, gone: set[int]
) -> None:
    book = tree()
    book.turn([A], X)
    book.turn([A, X, B], Y)
    book.turn([A, X, B], Z, body_hash=body, agent_id=agent_id)
    assert superseded(book.session) == set()
    book.turn([A, X, B, Z, C], X)
    assert superseded(book.session) == gone


ROWS: list[tuple[Branches, Loss, list[tuple[int, tuple[int, ...], set[int]]]]] = [
    ("kept", "once", [(1, (1, 3, 4), {1, 3, 4}), (2, (1, 5), {5})]),
    ("kept", "every", [(1, (1, 3, 4), {1, 3, 4}), (2, (1, 5), {1, 5})]),
    ("all", "once", [(0, (1, 2), {1, 2}), (1, (1, 3, 4), {3, 4}), (2, (1, 5), {5})]),
    ("main", "once", [(2, (1, 5), {1, 5})]),
    ("longest", "once", [(1, (1, 3, 4), {1, 3, 4})]),
]


def ended() -> Book:
    """1, then 2, which its retry 3 supersedes by its child 4, and the fork 5."""
    book = tree()
    book.turn([A], X)
    book.turn([A, X, B], Y)
    book.turn([A, X, B], Z)
    book.turn([A, X, B, Z, C], X)
    book.turn([A, X, D], Y)
    return book


@pytest.mark.parametrize(("branches", "loss", "expected"), ROWS)
def test_a_turn_is_in_the_loss_of_its_owner(
    branches: Branches, loss: Loss, expected: list[tuple[int, tuple[int, ...], set[int]]]
) -> None:
    rows = branch_rows(ended().session, branches, loss)
    assert [(row.leaf.branch, row.turns, set(row.in_loss)) for row in rows] == expected


def test_a_picker_sees_every_leaf() -> None:
    rows = branch_rows(ended().session, lambda found: [leaf.branch for leaf in found if leaf.is_superseded])
    assert [(row.turns, set(row.in_loss)) for row in rows] == [((1, 2), {1, 2})]
