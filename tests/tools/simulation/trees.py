"""What must hold of a tree of turns at the end of a schedule, by what an export would read of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sqlalchemy import Connection

from app.domain.branches import Branches
from app.domain.rules import superseded
from app.domain.session import Session, Turn
from app.export.rows import SessionRows, known
from app.store import bulk, reads


def problems(connection: Connection, session_id: str) -> Iterator[str]:
    """What is wrong with a session that is not erased, linear or not."""
    stored = bulk.read_sessions(connection, [session_id], reads.END, replay=True).get(session_id)
    if stored is None or stored.status == "erased":
        return
    found = known(stored)
    session = found.session
    gone = superseded(session)
    ways: tuple[tuple[Branches, set[int]], ...] = (("all", set()), ("kept", gone))
    for branches, left in ways:
        owners, tokens = _in_loss(SessionRows(stored, found, None, "turn", "", branches=branches))
        for turn in session.turns:
            rows, count = owners[turn.number], tokens[turn.number]
            if turn.number in left and not rows:
                continue
            is_context = turn.number <= session.context_turns
            if (rows, count) != ((0, 0) if is_context else (1, turn.output_tokens)):
                yield f"of {branches} rows {rows} have turn {turn.number} in their loss: {count} tokens"
    if session.is_tree:
        if not session.undone:  # Branches are numbered with those of the turns that are undone.
            yield from _branches(session)
        copied = 0 if session.fork is None else session.fork.turns
        for turn in session.turns:
            if turn.number > copied and not _is_deepest(session, turn):
                yield f"turn {turn.number} continues turn {turn.history_parent}, which is not the deepest that it could"


def _branches(session: Session) -> Iterator[str]:
    """A turn goes on with its parent's branch as the first child whose tokens continue, or begins the next one."""
    begun, has_child = 0, set[int]()
    for turn in session.turns:
        goes_on = turn.base_tokens > 0 and turn.parent not in has_child
        branch = session.turn(turn.parent).branch if goes_on else begun
        begun += not goes_on
        has_child.add(turn.history_parent)
        if (turn.branch, turn.branch_cause is None) != (branch, goes_on):
            yield f"turn {turn.number} is of branch {turn.branch} ({turn.branch_cause}), which should be {branch}"


def _in_loss(made: SessionRows) -> tuple[Counter[int], Counter[int]]:
    """By turn how many rows own it, and how many of its tokens are in a loss."""
    owners, tokens = Counter[int](), Counter[int]()
    for segment in made.segments:
        sample = made.row(segment, "", payloads=True).sample
        for span in sample.turns:
            owners[span.turn] += span.turn in segment.row.in_loss
            tokens[span.turn] += int(sample.loss_mask[span.output_start : span.end].sum())
    return owners, tokens


def _is_deepest(session: Session, turn: Turn) -> bool:
    """Did the turn join the deepest one that was committed when it was opened, and whose history begins its own?"""
    asked = _history(session, turn)[:-1]
    earlier = [other for other in session.turns if other.seq < turn.opened_seq]
    fits = [other.message_count for other in earlier if _history(session, other) == asked[: other.message_count]]
    return turn.base_messages == max(fits, default=0)


def _history(session: Session, turn: Turn) -> list[str]:
    hashes: list[str] = []
    for one in session.message_chain(turn.number):
        hashes = [*hashes[: one.base_messages], *one.message_hashes]
    return hashes
