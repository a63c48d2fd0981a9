"""Reads a session as a rollout beside others: what each turn was asked and did, and a few with their messages."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from app.domain.branches import newest_of, place_of
from app.domain.calls import Message
from app.domain.canonical import canonical_hash, decode_message
from app.domain.session import Session, Turn
from app.sessions.conversation import TURNS_PER_READ, ShownMessage, as_messages, newest_turn, turn_messages
from app.sessions.session_at import session_at
from app.store.content import load_frames
from app.store.ports import Database, of_session
from app.store.sessions import Frames
from turnlog.actions import Action, actions_of, has_failed, result_line
from workers import codec
from workers.codec import CorruptContent

MAX_TURNS = 2_000
"""Turns of one rollout that are listed; the first ones."""

MAX_STEPS = 20
"""Turns whose content is read at once."""

MAX_BYTES = 64 << 10
"""A longer message is listed without its text, which the session's own view has."""

MAX_BRANCHES = 100

MAX_ASKED = 4


class Mark(msgspec.Struct, frozen=True):
    """A turn in short. Two rollouts whose `mark` is equal have the same messages up to and with this turn, two whose
    `given` is equal those up to its reply. Ids of calls do not count: many engines make them at random.

    `asked` are the first lines of its last new messages, at most MAX_ASKED, and `failed` says that a result among them
    looks as if its call failed; `actions` are what the reply does. All are empty where the content is not there.
    """

    turn: int
    given: str
    mark: str
    asked: Sequence[str]
    failed: bool
    actions: Sequence[Action]
    output_tokens: int
    finish_reason: str | None


class RolloutBranch(msgspec.Struct, frozen=True):
    """`step` counts the turns from the beginning to where the branch leaves its parent; 0 for a beginning."""

    branch: int
    cause: str | None
    step: int


class Step(msgspec.Struct, frozen=True):
    """One turn's new messages, the reply last."""

    turn: int
    messages: Sequence[ShownMessage]


class RolloutView(msgspec.Struct, frozen=True):
    """A branch of a session. `tokens` is its length, of which `output_tokens` were sampled.

    `marks` are of its first MAX_TURNS of `turns` turns; `steps` those from the asked-for one on.
    """

    session_id: str
    version: int
    status: str
    group_id: str | None
    attempt: int | None
    reward: float | None
    components: Mapping[str, float]
    turns: int
    tokens: int
    output_tokens: int
    branch: int | None
    branches: Sequence[RolloutBranch]
    marks: Sequence[Mark]
    start: int
    steps: Sequence[Step]


async def rollout_view(database: Database, session_id: str, branch: int | None, start: int, limit: int) -> RolloutView:
    """Turns [start, start + limit) of a branch (None: that of the newest turn), counted from 0.

    Raises SessionNotFound, SessionUnreadable, StoreUnavailable, and NotFound for an unknown branch.
    """
    found = await session_at(database, session_id, None)
    session = found.session
    newest = None if session.leaf is None else newest_turn(session, branch)
    chain = [] if newest is None else session.message_chain(newest)
    part = chain[start : start + limit]
    steps: list[Step] = []
    if part:
        read = await of_session(database, session_id, load_frames, [turn.number for turn in part], tokens=False)
        steps = await asyncio.to_thread(
            lambda: [Step(turn.number, turn_messages([turn], read, MAX_BYTES)) for turn in part]
        )
    running, marks = hashlib.blake2b(digest_size=6), list[Mark]()
    for at in range(0, min(len(chain), MAX_TURNS), TURNS_PER_READ):
        some = chain[at : min(at + TURNS_PER_READ, MAX_TURNS)]
        frames = await of_session(database, session_id, load_frames, [turn.number for turn in some], tokens=False)
        marks += await asyncio.to_thread(_marks, session, some, frames, running)
    reward = session.reward
    return RolloutView(
        session_id=session.session_id,
        version=session.version,
        status=session.status,
        group_id=session.config.group_id,
        attempt=session.config.attempt,
        reward=None if reward is None else reward.reward,
        components={} if reward is None else reward.components,
        turns=len(chain),
        tokens=chain[-1].token_count if chain else 0,
        output_tokens=sum(turn.output_tokens for turn in chain),
        branch=chain[-1].branch if chain else None,
        branches=_branches(session),
        marks=marks,
        start=start,
        steps=steps,
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


def _marks(session: Session, turns: Sequence[Turn], frames: Frames, running: hashlib.blake2b) -> list[Mark]:
    """`running` is the hash of all earlier messages, and is taken on."""
    marks: list[Mark] = []
    for turn in turns:
        try:
            contents = as_messages(turn.protocol, codec.unpack_messages(frames.get(turn.number, (None, None))[1]))
        except CorruptContent:
            contents = []
        messages = [decode_message(message, "a stored message") for message in contents]
        committed_hashes = turn.message_hashes if messages else ()
        hashes = [
            canonical_hash(_without_ids(message), session.config.matcher) if b'"tool_call' in content else committed
            for content, message, committed in zip(contents, messages, committed_hashes, strict=True)
        ] or turn.message_hashes
        running.update("".join(hashes[:-1]).encode())
        given = running.hexdigest()
        running.update(hashes[-1].encode())
        asked = [message for message in messages[:-1] if message.get("role") not in ("system", "assistant")]
        marks.append(
            Mark(
                turn=turn.number,
                given=given,
                mark=running.hexdigest(),
                asked=[result_line(message) for message in asked[-MAX_ASKED:]],
                failed=any(map(has_failed, asked)),
                actions=actions_of(messages[-1:]),
                output_tokens=turn.output_tokens,
                finish_reason=turn.finish_reason,
            )
        )
    return marks


def _without_ids(message: Message) -> Message:
    calls = message.get("tool_calls")
    return {
        name: [{**call, "id": None} if isinstance(call, Mapping) else call for call in calls]
        if name == "tool_calls" and isinstance(calls, list)
        else value
        for name, value in message.items()
        if name != "tool_call_id"
    }
