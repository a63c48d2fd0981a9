"""A session's tree for people: its turns and branches, and which rows of an export have them in their loss."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from app.domain.branches import TEXT_ONLY, Branches, BranchRow, Loss, Picker, branch_rows, place_of, turns_left_out
from app.domain.events import Event, TurnCommitted
from app.domain.rules import superseded
from app.domain.session import OpenTurn, Session, Turn
from app.sessions.as_reply import as_reply
from app.sessions.session_at import SessionAt, session_at
from app.store.content import load_frames
from app.store.damage import attempt_or
from app.store.database import Database
from turnlog.actions import task_of
from turnlog.replies import Tree, TreeBranch, TreeTurn
from workers import codec
from workers.codec import CorruptContent

ERASED = "erased"
COPIED = "copied from another session, which has it in its loss"

MAX_TITLES = 200
"""Branches whose first messages are read, the oldest ones."""

TITLES_PER_READ = 10
"""Turns whose content is in memory at once; a message may have megabytes."""


async def whole_tree(database: Database, session_id: str, branches: Branches | Picker, loss: Loss) -> Tree:
    """The tree of the whole log, with its branches' titles.

    Raises SessionNotFound, SessionUnreadable, StoreUnavailable.
    """
    state = await session_at(database, session_id, whole=True)
    tree = await asyncio.to_thread(tree_of, state, branches, loss)
    if state.session.status != "erased":
        await _add_titles(database, session_id, tree)
    return tree


async def _add_titles(database: Database, session_id: str, tree: Tree) -> None:
    first: dict[int, int] = {}
    for turn in tree["turns"]:
        if turn["branch"] is not None:
            first.setdefault(turn["branch"], turn["turn"])
    named = [branch for branch in tree["branches"] if branch["branch"] in first][:MAX_TITLES]
    for at in range(0, len(named), TITLES_PER_READ):
        part = named[at : at + TITLES_PER_READ]
        numbers = [first[branch["branch"]] for branch in part]
        read = partial(load_frames, session_id=session_id, numbers=numbers, tokens=False)
        frames = await database.read(lambda connection: attempt_or(connection, read, {}), session_id=session_id)  # noqa: B023
        titles = await asyncio.to_thread(lambda: [_title_of(frames.get(one)) for one in numbers])  # noqa: B023
        for branch, title in zip(part, titles, strict=True):
            branch["title"] = title


def _title_of(frame: tuple[bytes | None, bytes | None] | None) -> str | None:
    """None also where the content is damaged: the tree is of the log."""
    try:
        said = codec.unpack_messages(None if frame is None else frame[1])
        return task_of([msgspec.json.decode(raw) for raw in (*said.messages, said.message)]) or None
    except (CorruptContent, msgspec.MsgspecError):
        return None


def tree_of(state: SessionAt, branches: Branches | Picker = "kept", loss: Loss = "once") -> Tree:
    """Without titles, which are not in the log."""
    session = state.session
    is_erased = session.status == "erased"
    rows = [] if is_erased else branch_rows(session, branches, loss)
    left_out = turns_left_out(session, rows, branches)
    reasons = (
        {turn.number: ERASED for turn in session.every_turn}
        if is_erased
        else {turn.number: why for turn, why in left_out}
    )
    return Tree(
        session_id=session.session_id,
        version=session.version,
        status=session.status,
        history=session.history,
        main_branch=None if session.leaf is None else session.leaf.branch,
        branches=_branches(session, rows, reasons),
        turns=[*_committed(state, rows, reasons), *map(_open, session.open_turns.values())],
    )


def _committed(state: SessionAt, rows: Sequence[BranchRow], reasons: Mapping[int, str]) -> list[TreeTurn]:
    session = state.session
    gone = superseded(session)
    losses: dict[int, list[int]] = {}
    for row in rows:
        for number in row.in_loss:
            losses.setdefault(number, []).append(row.leaf.branch)
    return [
        TreeTurn(
            turn=turn.number,
            parent=turn.history_parent,
            agent_id=turn.agent_id,
            state="undone" if turn.number in session.undone else "committed",
            branch=turn.branch,
            cause=turn.branch_cause,
            carries=turn.carries,
            superseded=turn.number in gone,
            messages=turn.message_count,
            tokens=turn.token_count,
            output_tokens=turn.output_tokens,
            finish_reason=turn.finish_reason,
            weight_versions=_versions(state.events[turn.seq - 1].event),
            exported=turn.number not in reasons,
            reason=reasons.get(turn.number)
            or (COPIED if turn.number <= session.context_turns else TEXT_ONLY if session.is_text else None),
            loss_branches=losses.get(turn.number, []),
            left_out=list(turn.left_out),
        )
        for turn in session.every_turn
    ]


def _versions(event: Event) -> list[str]:
    assert isinstance(event, TurnCommitted)
    return list(dict.fromkeys(span.version for span in event.weight_versions))


def _open(turn: OpenTurn) -> TreeTurn:
    unknown = ("branch", "cause", "carries", "messages", "tokens", "output_tokens", "finish_reason")
    lists: dict[str, Any] = {"weight_versions": [], "loss_branches": [], "left_out": []}
    told = {"state": "open", "superseded": False, "exported": False, "reason": "in flight"}
    return as_reply(TreeTurn, turn, **dict.fromkeys(unknown), **lists, **told)


def _branches(session: Session, rows: Sequence[BranchRow], reasons: Mapping[int, str]) -> list[TreeBranch]:
    ends = {row.leaf.branch for row in rows}
    rows_of = {number: row.leaf.branch for row in rows for number in row.turns}
    own: dict[int, list[Turn]] = {}
    for turn in session.turns:
        own.setdefault(turn.branch, []).append(turn)
    made: list[TreeBranch] = []
    for branch, turns in sorted(own.items()):
        place, leaf = place_of(session, turns[0]), turns[-1]
        reason = None
        if branch not in ends:
            reason = reasons.get(leaf.number) or f"continued by branch {rows_of[leaf.number]}"
        made.append(
            TreeBranch(
                branch=branch,
                cause=place.cause,
                parent_branch=place.parent_branch,
                fork_turn=place.fork_turn,
                agent_id=turns[0].agent_id,
                title=None,
                leaf=leaf.number,
                turns=len(turns),
                tokens=leaf.token_count,
                exported=branch in ends,
                reason=reason,
            )
        )
    return made
