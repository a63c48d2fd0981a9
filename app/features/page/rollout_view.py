"""Rollouts side by side: the steps of each, aligned with the first one's, and the whole texts of a few."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from app.domain.branches import newest_of, place_of
from app.domain.session import Session, Turn
from app.errors import NotFound, SessionNotFound, SessionUnreadable
from app.sessions.conversation import TURNS_PER_READ, ShownMessage, newest_turn, turn_messages
from app.sessions.session_at import SessionAt, session_at
from app.store.content import load_frames
from app.store.ports import Database, of_session
from app.store.sessions import Frames, HeadRow, load_heads
from turnlog.actions import Action, Call, calls_of, field, said_by, text_of
from turnlog.alignment import START, Step, add_turn, align, changed, first_difference, table

COLUMNS = 12
"""Rollouts at a time."""

MAX_KEYS = 500
"""Rollouts that one request orders."""

MAX_TURNS = 2_000
"""Steps of one rollout that are compared; the first ones."""

MAX_BYTES = 64 << 10
"""A longer message is not shown, which the session's own view does."""

MAX_BRANCHES = 100

MAX_SAID = 200
"""Bytes of an annotation that is shown."""

Order = Literal["contrast", "attempt", "best", "worst", "longest"]
"""`contrast`: the best, then the worst, then the others as they were named."""

Part = tuple[bool, str]
"""A part of a text, and whether the first rollout's lacks it."""


class RolloutBranch(msgspec.Struct, frozen=True):
    """`step` counts the turns from the beginning to where the branch leaves its parent; 0 for a beginning."""

    branch: int
    cause: str | None
    step: int


class Rollout(msgspec.Struct, frozen=True):
    """A branch of a session. `tokens` is its length, of which `output_tokens` were sampled; `annotations` are the
    session's. `difference` says in words where it differs first from the first rollout, in row `differs_at`."""

    key: str
    name: str
    session_id: str
    status: str
    reward: float | None
    components: Mapping[str, float]
    annotations: Sequence[Mapping[str, Any]]
    turns: int
    tokens: int
    output_tokens: int
    branch: int | None
    branches: Sequence[RolloutBranch]
    difference: str | None = None
    differs_at: int | None = None


class Unread(msgspec.Struct, frozen=True):
    """A rollout that cannot be shown."""

    key: str
    name: str
    session_id: str
    error: str


class Cell(msgspec.Struct, frozen=True):
    """A turn in short, with the first lines of what came back. `same`: as the first rollout's, in what it did and got.
    Turn 0 is the task, before the first turn."""

    turn: int
    actions: Sequence[Action]
    results: Sequence[str]
    failed: bool
    output_tokens: int
    finish_reason: str | None
    same: bool


class ComparedRow(msgspec.Struct, frozen=True):
    """`step` is the first rollout's, null where that has none; a cell is null where its column has none."""

    step: int | None
    cells: Sequence[Cell | None]


class Comparison(msgspec.Struct, frozen=True):
    """At most COLUMNS of `total` rollouts, from index `start` on. `is_contrast`: the best and the worst come first."""

    total: int
    is_contrast: bool
    columns: Sequence[Rollout | Unread]
    rows: Sequence[ComparedRow]


class StepTexts(msgspec.Struct, frozen=True):
    """What a turn said and called, and what came back, in parts."""

    said: Sequence[Part]
    got: Sequence[Part]


class _Read(msgspec.Struct, frozen=True):
    """A rollout as it was read; its steps begin with the task."""

    found: SessionAt
    chain: Sequence[Turn]
    steps: Sequence[Step]


async def compare(database: Database, keys: Sequence[str], order: Order, start: int, run: str | None) -> Comparison:
    """Rollouts by their keys, a session's id or `id@branch`, from index `start` of the order on. What cannot be read is
    a column without steps, and so is with `run` what another run has. Raises StoreUnavailable.
    """
    ids = [parted(key)[0] for key in keys]
    found = await database.read(lambda connection: load_heads(connection, ids))
    heads = {head.session_id: head for head in found if run in (None, head.run)}
    ordered, is_contrast = _ordered(keys, heads, order)
    shown = ordered[start : start + COLUMNS]
    read: dict[str, _Read | str] = {}
    for key in shown:
        session_id, branch = parted(key)
        try:
            if run is not None and session_id not in heads:
                raise SessionNotFound.of(session_id)
            read[key] = await _read(database, session_id, branch)
        except (SessionNotFound, SessionUnreadable, NotFound) as error:
            read[key] = str(error)
    names = {key: _name(key, heads, are_branches=len(set(ids)) == 1) for key in shown}
    columns, rows = await asyncio.to_thread(_compared, read, names)
    return Comparison(len(keys), is_contrast, columns, rows)


def parted(key: str) -> tuple[str, int | None]:
    """A session's id, and the number of a branch, by default the newest turn's."""
    session_id, _, branch = key.partition("@")
    return session_id, int(branch) if branch else None


def _name(key: str, heads: Mapping[str, HeadRow], *, are_branches: bool) -> str:
    session_id, branch = parted(key)
    if are_branches and branch is not None:
        return f"branch {branch}"
    attempt = heads[session_id].attempt if session_id in heads else None
    return session_id if attempt is None else f"attempt {attempt}"


def _ordered(keys: Sequence[str], heads: Mapping[str, HeadRow], order: Order) -> tuple[list[str], bool]:
    """The keys in this order, those without a reward behind the others; and whether the best and the worst lead."""
    found = {key: heads.get(parted(key)[0]) for key in keys}
    rewards = {key: head.reward for key, head in found.items() if head is not None and head.reward is not None}
    ranks: dict[Order, Callable[[str], float]] = {
        "best": lambda key: -rewards.get(key, float("-inf")),
        "worst": lambda key: rewards.get(key, float("inf")),
        "longest": lambda key: 0 if (head := found[key]) is None else -head.turns,
    }
    if order in ranks:
        return sorted(keys, key=ranks[order]), False
    if order == "attempt" or len(set(rewards.values())) < 2:
        return list(keys), False
    ends = [max(rewards, key=rewards.__getitem__), min(rewards, key=rewards.__getitem__)]
    return [*ends, *(key for key in keys if key not in ends)], True


async def _read(database: Database, session_id: str, branch: int | None) -> _Read:
    """Raises SessionNotFound, SessionUnreadable, StoreUnavailable, and NotFound for an unknown branch."""
    found = await session_at(database, session_id, None)
    newest = newest_turn(found.session, branch)
    chain = [] if newest is None else found.session.message_chain(newest)
    steps = [START]
    for at in range(0, min(len(chain), MAX_TURNS), TURNS_PER_READ):
        part = chain[at : min(at + TURNS_PER_READ, MAX_TURNS)]
        frames = await of_session(database, session_id, load_frames, [turn.number for turn in part], tokens=False)
        await asyncio.to_thread(_add, steps, session_id, part, frames)
    return _Read(found, chain, steps)


def _add(steps: list[Step], session_id: str, turns: Sequence[Turn], frames: Frames) -> None:
    for turn in turns:
        messages = [_decoded(one) for one in turn_messages([turn], frames)]
        messages = [] if None in messages else messages
        add_turn(steps, turn.number, messages, f"turn {turn.number} of {session_id}")


def _decoded(shown: ShownMessage) -> Any:
    return None if shown.message is None else msgspec.json.decode(shown.message)


def _compared(
    read: Mapping[str, _Read | str], names: Mapping[str, str]
) -> tuple[list[Rollout | Unread], list[ComparedRow]]:
    steps = [[] if isinstance(one, str) else one.steps for one in read.values()]
    turns = [{} if isinstance(one, str) else {turn.number: turn for turn in one.chain} for one in read.values()]
    rows: list[ComparedRow] = []
    differs_at: dict[int, int] = {}
    aligned = [align(steps[0], other) for other in steps]
    for indexes in table(len(steps[0]), aligned[1:]) if steps else []:
        first = None if indexes[0] is None else steps[0][indexes[0]]
        cells: list[Cell | None] = []
        for column, at in enumerate(indexes):
            step = None if at is None else steps[column][at]
            same = step is not None and first is not None and first.agrees(step)
            cells.append(None if step is None else _cell(step, turns[column].get(step.turn), same=same))
            if not same and (step is not None or first is not None) and steps[column]:
                differs_at.setdefault(column, len(rows))
        rows.append(ComparedRow(indexes[0], cells))
    columns: list[Rollout | Unread] = []
    for column, (key, one) in enumerate(read.items()):
        if isinstance(one, str):
            columns.append(Unread(key, names[key], parted(key)[0], one))
            continue
        first_name = next(iter(names.values()))
        difference = (
            first_difference(steps[0], one.steps, aligned[column], first_name, names[key]) if steps[0] else None
        )
        columns.append(_rollout(key, names[key], one, difference, differs_at.get(column)))
    return columns, rows


def _cell(step: Step, turn: Turn | None, *, same: bool) -> Cell:
    tokens, finish = (0, None) if turn is None else (turn.output_tokens, turn.finish_reason)
    return Cell(step.turn, step.actions, step.results, step.failed, tokens, finish, same)


def _rollout(key: str, name: str, read: _Read, difference: str | None, differs_at: int | None) -> Rollout:
    session, chain = read.found.session, read.chain
    reward = session.reward
    return Rollout(
        key=key,
        name=name,
        session_id=session.session_id,
        status=session.status,
        reward=None if reward is None else reward.reward,
        components={} if reward is None else reward.components,
        annotations=read.found.said_of(0, MAX_SAID),
        turns=len(chain),
        tokens=chain[-1].token_count if chain else 0,
        output_tokens=sum(turn.output_tokens for turn in chain),
        branch=chain[-1].branch if chain else None,
        branches=_branches(session),
        difference=difference,
        differs_at=None if difference is None else differs_at,
    )


def _branches(session: Session) -> list[RolloutBranch]:
    """The first MAX_BRANCHES; nothing where there is only one."""
    if session.branches < 2:
        return []
    found = []
    for branch in range(min(session.branches, MAX_BRANCHES)):
        place = place_of(session, newest_of(session, branch))
        step = 0 if not place.fork_turn else len(session.message_chain(place.fork_turn))
        found.append(RolloutBranch(branch, place.cause, step))
    return found


async def step_texts(database: Database, asked: Sequence[str]) -> list[StepTexts]:
    """The whole texts of one turn of each rollout: `key/turn`, turn 0 for the task, none for nothing.

    Parts are marked that the first rollout lacks, and of two also those that only the first has. Raises
    SessionNotFound, SessionUnreadable, StoreUnavailable, and NotFound for an unknown branch.
    """
    texts = [await _texts(database, *one.split("/")) for one in asked]

    def parts() -> list[StepTexts]:
        others = [texts[1] if len(texts) == 2 else texts[0], *(texts[0] for _ in texts[1:])]
        pairs = zip(texts, others, strict=True)
        return [StepTexts(changed(said, other[0]), changed(got, other[1])) for (said, got), other in pairs]

    return await asyncio.to_thread(parts)


async def _texts(database: Database, key: str, wanted: str) -> tuple[str, str]:
    if not wanted:
        return "", ""
    (session_id, branch), number = parted(key), int(wanted)
    session = (await session_at(database, session_id, None)).session
    newest = newest_turn(session, branch)
    chain = [] if newest is None else session.message_chain(newest)
    own = [turn for turn in chain if turn.number == number]
    following = [turn for turn in chain if turn.number > number][:1]
    part = [turn.number for turn in (*own, *following)]
    frames = await of_session(database, session_id, load_frames, part, tokens=False)
    return await asyncio.to_thread(
        lambda: (
            "\n\n".join(map(_said, turn_messages(own, frames, MAX_BYTES)[-1:])),
            "\n\n".join(map(_brought, turn_messages(following, frames, MAX_BYTES)[:-1])),
        )
    )


def _brought(shown: ShownMessage) -> str:
    message = _decoded(shown)
    return f"[{shown.error}]" if message is None else f"{field(message, 'role')}:\n{_said(shown)}"


def _said(shown: ShownMessage) -> str:
    message = _decoded(shown)
    if message is None:
        return f"[{shown.error}]"
    thought, said = said_by(message)
    return "\n".join(filter(None, (thought and f"(reasoning) {thought}", said, *map(_called, calls_of(message)))))


def _called(call: Call) -> str:
    """A call with its arguments, one a line, the texts among them as they are."""
    given = call.given
    if not isinstance(given, Mapping):
        return f"calls {call.name} {text_of(call.arguments)}"
    named = (f"  {name}: {one if isinstance(one, str) else json.dumps(one, indent=2)}" for name, one in given.items())
    return "\n".join((f"calls {call.name}", *named))
