"""Reads a session as a rollout beside others: all its turns in short, a few with their content."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from app.domain.branches import newest_of, place_of
from app.domain.history import Message, canonical_hash, decode_message
from app.domain.session import Session, Turn
from app.export.rows import as_messages
from app.features.page.conversation import TURNS_PER_READ, ShownMessage, unknown_branch
from app.sessions.session_at import session_at
from app.store import reads
from app.store.engine import Database
from app.store.reads import Frames
from workers import codec
from workers.codec import CorruptContent

MAX_TURNS = 2_000
"""Turns of one rollout that are listed; the first ones."""

MAX_STEPS = 20
"""Turns whose content is read at once."""

MAX_BYTES = 64 << 10
"""A longer message is listed without its text, which the session's own view has."""

MAX_BRANCHES = 100

STRIP = 96
"""Parts of a turn's strip of probabilities. Each has the lowest probability of its tokens, so that none is hidden."""


class Mark(NamedTuple):
    """A turn in the list. Two rollouts whose `mark` is equal have the same messages up to and with this turn.

    Ids of calls do not count: many engines make them at random.
    """

    turn: int
    mark: str
    output_tokens: int
    finish_reason: str | None


class RolloutBranch(msgspec.Struct, frozen=True):
    """`step` counts the turns from the beginning to where the branch leaves its parent; 0 for a beginning."""

    branch: int
    cause: str | None
    step: int


class Step(msgspec.Struct, frozen=True):
    """One turn: its new messages, the reply last, and the probabilities of the reply's tokens.

    `strip` has natural logarithms; `error` says why the tokens cannot be read.
    """

    turn: int
    messages: Sequence[ShownMessage]
    prompt_tokens: int
    output_tokens: int
    finish_reason: str | None
    mean_logprob: float | None
    strip: Sequence[float]
    error: str | None


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


class Rollouts:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def at(self, session_id: str, branch: int | None, start: int, limit: int) -> RolloutView:
        """Turns [start, start + limit) of a branch (None: that of the newest turn), counted from 0.

        Raises SessionNotFound, SessionUnreadable, StoreUnavailable, and NotFound for an unknown branch.
        """
        found = await session_at(self._database, session_id, None)
        session = found.session
        chain = _chain(session, branch)
        part = chain[start : start + limit]
        steps: list[Step] = []
        if part:
            steps = await asyncio.to_thread(_steps, part, await self._frames(session_id, part))
        return _view(session, chain, await self._marks(session, chain[:MAX_TURNS]), start, steps)

    async def _marks(self, session: Session, chain: Sequence[Turn]) -> list[Mark]:
        running = hashlib.blake2b(digest_size=6)
        marks: list[Mark] = []
        for at in range(0, len(chain), TURNS_PER_READ):
            part = chain[at : at + TURNS_PER_READ]
            frames = await self._frames(session.session_id, part, tokens=False)
            for turn, hashes in zip(part, await asyncio.to_thread(_hashes, session, part, frames), strict=True):
                running.update("".join(hashes).encode())
                marks.append(Mark(turn.number, running.hexdigest(), turn.output_tokens, turn.finish_reason))
        return marks

    async def _frames(self, session_id: str, part: Sequence[Turn], *, tokens: bool = True) -> Frames:
        numbers = [turn.number for turn in part]
        return await self._database.read(
            lambda connection: reads.load_frames(connection, session_id, numbers, tokens=tokens), session_id=session_id
        )


def _chain(session: Session, branch: int | None) -> list[Turn]:
    if session.leaf is None:
        return []
    if branch is None:
        return session.message_chain(session.leaf.number)
    try:
        return session.message_chain(newest_of(session, branch).number)
    except KeyError:
        raise unknown_branch(session, branch) from None


def _view(
    session: Session, chain: Sequence[Turn], marks: Sequence[Mark], start: int, steps: Sequence[Step]
) -> RolloutView:
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


def _hashes(session: Session, turns: Sequence[Turn], frames: Frames) -> list[list[str]]:
    """The hashes of each turn's messages, its calls without their ids; as committed where its content is not there."""
    return [_hashes_of(session, turn, frames.get(turn.number, (None, None))[1]) for turn in turns]


def _hashes_of(session: Session, turn: Turn, frame: bytes | None) -> list[str]:
    try:
        messages = as_messages(turn.protocol, codec.unpack_messages(frame))
    except CorruptContent:
        return list(turn.message_hashes)
    return [
        canonical_hash(_without_ids(decode_message(message, "a stored message")), session.config.matcher)
        if b'"tool_call' in message
        else committed
        for message, committed in zip(messages, turn.message_hashes, strict=True)
    ]


def _without_ids(message: Message) -> Message:
    calls = message.get("tool_calls")
    return {
        name: [{**call, "id": None} if isinstance(call, Mapping) else call for call in calls]
        if name == "tool_calls" and isinstance(calls, list)
        else value
        for name, value in message.items()
        if name != "tool_call_id"
    }


def _steps(turns: Sequence[Turn], frames: Frames) -> list[Step]:
    return [_step(turn, *frames.get(turn.number, (None, None))) for turn in turns]


def _step(turn: Turn, token_frame: bytes | None, exchange_frame: bytes | None) -> Step:
    error, logprobs = None, np.empty(0)
    try:
        logprobs = np.frombuffer(codec.unpack_tokens(token_frame, exchange_frame).logprobs, "<f8")
    except CorruptContent as fault:
        error = str(fault)
    return Step(
        turn=turn.number,
        messages=_messages(turn, exchange_frame),
        prompt_tokens=turn.token_count - turn.output_tokens,
        output_tokens=turn.output_tokens,
        finish_reason=turn.finish_reason,
        mean_logprob=float(logprobs.mean()) if len(logprobs) else None,
        strip=[round(float(part.min()), 3) for part in np.array_split(logprobs, min(STRIP, len(logprobs)))]
        if len(logprobs)
        else [],
        error=error,
    )


def _messages(turn: Turn, frame: bytes | None) -> list[ShownMessage]:
    """The turn's own messages; if its content is damaged or deleted, one that says so."""
    end = turn.message_count - 1
    try:
        contents = as_messages(turn.protocol, codec.unpack_messages(frame))
    except CorruptContent as error:
        return [ShownMessage(turn.base_messages, turn.number, False, None, str(error))]
    return [
        ShownMessage(index, turn.number, index == end, msgspec.Raw(message))
        if len(message) <= MAX_BYTES
        else ShownMessage(index, turn.number, index == end, None, f"{len(message)} bytes: see the session")
        for index, message in enumerate(contents, turn.base_messages)
    ]
