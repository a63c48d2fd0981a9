"""Which branches of a session become rows, and which row has a turn in its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from app.domain.events import BranchCause
from app.domain.rules import leaves, superseded
from app.domain.session import Session, Turn

Branches = Literal["kept", "main", "longest", "all"]
"""Which leaves become rows: those that nothing superseded, the newest turn's, the longest of the kept, or every one."""

Loss = Literal["once", "every"]
"""Whether a sampled token is in the loss of one row, or of every row that has it."""


class Leaf(msgspec.Struct, frozen=True):
    """The end of a branch, as an operator's picker sees it: `turn` is its newest turn, `tokens` its whole length."""

    branch: int
    turn: int
    cause: BranchCause | None
    agent_id: str | None
    tokens: int
    turns: int
    finish_reason: str | None
    is_superseded: bool
    is_main: bool


Picker = Callable[[Sequence[Leaf]], Iterable[int]]
"""An operator's picker: the branches that become rows, of a session's leaves."""


class BranchRow(msgspec.Struct, frozen=True):
    """A branch that becomes a row: the turns of its tokens, oldest first, and those that are in its loss."""

    leaf: Turn
    turns: tuple[int, ...]
    in_loss: frozenset[int]


class Place(msgspec.Struct, frozen=True):
    """Where a branch begins: its cause, and the turn that it leaves with that turn's branch; None for a beginning."""

    cause: BranchCause | None
    parent_branch: int | None
    fork_turn: int | None


def branch_rows(session: Session, branches: Branches | Picker = "kept", loss: Loss = "once") -> list[BranchRow]:
    """The rows of a session, by branch. A turn is in the loss of the lowest-numbered one of these that has it.

    Copied turns of a fork are in no loss, unless the fork was made so.
    """
    picked = pick(session, branches)
    taken = {turn.number for turn in session.turns if turn.number <= session.context_turns}
    rows: list[BranchRow] = []
    for leaf in picked:
        chain = tuple(turn.number for turn in session.token_chain(leaf.number))
        own = frozenset(number for number in chain if number not in taken)
        if loss == "once":
            taken |= own
        rows.append(BranchRow(leaf, chain, own))
    return rows


def pick(session: Session, branches: Branches | Picker) -> list[Turn]:
    """The leaves that become rows, by branch."""
    newest = session.leaf
    if newest is None:
        return []
    if branches == "all":
        return leaves(session.turns)
    if branches == "main":
        return [newest]
    gone = superseded(session)
    kept = leaves([turn for turn in session.turns if turn.number not in gone])
    if branches == "kept":
        return kept
    if branches == "longest":
        return [max(kept, key=lambda turn: (turn.token_count, -turn.branch))]
    every = leaves(session.turns)
    wanted = set(branches([_leaf(session, turn, gone) for turn in every]))
    return [turn for turn in every if turn.branch in wanted]


def row_of(session: Session, branch: int) -> BranchRow:
    """The kept row of a branch; of one that has none, its newest turn's with nothing in the loss. Raises KeyError."""
    kept = next((row for row in branch_rows(session) if row.leaf.branch == branch), None)
    if kept is not None:
        return kept
    leaf = newest_of(session, branch)
    return BranchRow(leaf, tuple(turn.number for turn in session.token_chain(leaf.number)), frozenset())


def newest_of(session: Session, branch: int) -> Turn:
    """The newest turn of a branch. Raises KeyError."""
    for turn in reversed(session.turns):
        if turn.branch == branch:
            return turn
    raise KeyError(branch)


TEXT_ONLY = "text_only"
"""Why a session without ids has no row in a shape with tokens."""

UNDONE = "undone: the store was restored to an earlier checkpoint"


def turns_left_out(
    session: Session, rows: Sequence[BranchRow], branches: Branches | Picker | None
) -> Iterator[tuple[Turn, str]]:
    """The turns that no row has, and why. `branches` is what was asked for; None: nothing."""
    gone, taken = superseded(session), {number for row in rows for number in row.turns}
    for turn in session.turns:
        if turn.number in taken:
            continue
        if turn.number in gone:
            yield turn, "superseded" if session.is_tree else "rolled back"
        else:
            is_named = isinstance(branches, str)
            yield turn, f"not in branches={branches}" if is_named else "not picked by TURNLOG_PICKER"
    for turn in session.undone:
        yield turn, UNDONE


def _leaf(session: Session, turn: Turn, gone: set[int]) -> Leaf:
    return Leaf(
        branch=turn.branch,
        turn=turn.number,
        cause=place_of(session, turn).cause,
        agent_id=turn.agent_id,
        tokens=turn.token_count,
        turns=len(session.token_chain(turn.number)),
        finish_reason=turn.finish_reason,
        is_superseded=turn.number in gone,
        is_main=turn is session.leaf,
    )


def place_of(session: Session, turn: Turn) -> Place:
    """Where the turn's branch begins."""
    first = turn
    while first.branch_cause is None and first.parent:
        first = session.turn(first.parent)
    before = session.turns.get(first.history_parent)
    if before is None:
        return Place(first.branch_cause, None, None)
    return Place(first.branch_cause, before.branch, before.number)
