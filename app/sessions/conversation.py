"""Reads what was said in a session: the messages up to a turn, live or discarded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict

from app.domain import cursors
from app.domain.branches import newest_of
from app.domain.events import shape_of
from app.domain.session import AssignedReward, Session, Turn
from app.errors import NotFound, SessionClosed, SessionUnreadable
from app.sessions.session_at import SessionAt, session_at
from app.store.content import load_blobs, load_frames
from app.store.database import Database
from app.store.ports import of_session
from app.store.sessions import Frames
from workers import codec
from workers.codec import CorruptContent, Messages

MAX_MESSAGES = 2_000
MAX_BYTES = 8 << 20
"""Limits of one reply. A message over MAX_BYTES is listed without its text."""

TURNS_PER_READ = 64
"""Turns in one read, from the newest back."""


class ShownMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message with its index in the history. `sampled`: an engine generated it. If it is null, `error` says why.

    `reward` and `annotations` are those of a turn, beside its reply, for whom they are for.
    """

    index: int
    turn: int
    agent_id: str | None
    sampled: bool
    message: msgspec.Raw | None
    error: str | None = None
    reward: Mapping[str, Any] | None = None
    annotations: Sequence[Mapping[str, Any]] = ()


class ConversationView(msgspec.Struct, frozen=True):
    """The messages up to turn `turn` (null if the session has none), without the `omitted` oldest ones.

    `params` and `tools` are those of the turn's request, as sent to the engine. `errors` maps each of the two that
    cannot be read to the reason.
    """

    turn: int | None
    messages: Sequence[ShownMessage]
    params: msgspec.Raw | None
    tools: msgspec.Raw | None
    omitted: int
    errors: Mapping[str, str]


class _Place(msgspec.Struct, frozen=True):
    """A cursor: the messages up to turn `turn`, from `index` on."""

    turn: int
    index: int


class Conversations:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def at(
        self, session_id: str, seq: int | None, turn: int | None, branch: int | None = None
    ) -> ConversationView:
        """The conversation up to `turn`, else up to the newest turn, of `branch` if that is given, after event `seq`.

        Raises as `session_at`, and NotFound for an unknown turn or branch.
        """
        found = await session_at(self._database, session_id, seq)
        number = newest_turn(found.session, branch) if turn is None else turn
        if number is None:
            return ConversationView(None, [], None, None, 0, {})
        _, event = found.turn(number)
        messages = await self._messages(found, number)
        errors: dict[str, str] = {}
        params = await self._blob(session_id, event.params, "params", errors)
        tools = None if event.tools is None else await self._blob(session_id, event.tools, "tools", errors)
        total = event.base_messages + event.new_messages + 1
        return ConversationView(number, messages, params, tools, total - len(messages), errors)

    async def page(
        self, session_id: str, branch: int | None, turn: int | None, cursor: str | None, limit: int, *, judged: bool
    ) -> dict[str, Any]:
        """A page of a branch's conversation, oldest message first, or of one turn's own messages.

        A cursor stays with its turn, whatever the session does meanwhile. `judged`: rewards and annotations too.
        Raises SessionNotFound, SessionClosed (erased), SessionUnreadable, NotFound, InvalidRequest, StoreUnavailable.
        """
        found = await session_at(self._database, session_id, whole=True)
        if turn is not None:
            found = found._replace(session=found.session.with_undone)
        session = found.session
        if session.status == "erased":
            raise SessionClosed.of(session_id, "is erased")
        start, number = 0, newest_turn(session, branch) if turn is None else turn
        if cursor is not None:
            place: _Place = cursors.decode(cursor, _Place, f"/sessions/{session_id}/messages")
            start, number = place.index, place.turn if turn is None else turn
        chain: list[Turn] = []
        if number is not None:
            found.turn(number)  # raises NotFound
            chain = session.message_chain(number) if turn is None else [session.turn(number)]
        messages, following = await self._from(session_id, chain, start, limit)
        if judged:
            messages = [_judged(one, found) for one in messages]
        said: dict[str, Any] = {"session_id": session_id, "status": session.status, "turn": number}
        said["branch"] = None if number is None else session.turn(number).branch
        said["messages"] = messages
        said["next_cursor"] = None if number is None or following is None else cursors.encode(_Place(number, following))
        if judged:
            said |= {"reward": _reward(session.reward), "annotations": found.said_of(0)}
        return said

    async def _from(
        self, session_id: str, chain: Sequence[Turn], start: int, limit: int
    ) -> tuple[list[ShownMessage], int | None]:
        """The messages of a chain from index `start` on that fit, and the index of the first one that does not."""
        chain = [turn for turn in chain if turn.message_count > start]
        page: list[ShownMessage] = []
        room = MAX_BYTES
        for at in range(0, len(chain), TURNS_PER_READ):
            for shown in await self._read(session_id, chain[at : at + TURNS_PER_READ]):
                if shown.index < start:
                    continue
                room -= _size(shown)
                if len(page) == limit or (page and room < 0):
                    return page, shown.index
                page.append(shown)
        return page, None

    async def _messages(self, found: SessionAt, number: int) -> list[ShownMessage]:
        """The newest messages that fit, oldest first."""
        chain = found.session.message_chain(number)
        newest: list[ShownMessage] = []
        room = MAX_BYTES
        while chain and len(newest) < MAX_MESSAGES and room > 0:
            part, chain = chain[-TURNS_PER_READ:], chain[:-TURNS_PER_READ]
            for shown in reversed(await self._read(found.session.session_id, part)):
                size = _size(shown)
                if size > room or len(newest) == MAX_MESSAGES:
                    room = 0
                    break
                room -= size
                newest.append(shown)
        newest.reverse()
        return newest

    async def _read(self, session_id: str, turns: Sequence[Turn]) -> list[ShownMessage]:
        """The turns' own messages."""
        numbers = [turn.number for turn in turns]
        frames = await of_session(self._database, session_id, load_frames, numbers, tokens=False)
        return await asyncio.to_thread(turn_messages, turns, frames)

    async def _blob(self, session_id: str, number: int, name: str, errors: dict[str, str]) -> msgspec.Raw | None:
        try:
            found = await of_session(self._database, session_id, load_blobs, [number])
        except SessionUnreadable as error:
            errors[name] = str(error)
            return None
        return msgspec.Raw(found[number])


def newest_turn(session: Session, branch: int | None) -> int | None:
    if branch is None:
        return None if session.leaf is None else session.leaf.number
    try:
        return newest_of(session, branch).number
    except KeyError:
        raise unknown_branch(session, branch) from None


def unknown_branch(session: Session, branch: int) -> NotFound:
    return NotFound(f"session {session.session_id} has no branch {branch} at event {session.version}")


def turn_messages(turns: Sequence[Turn], frames: Frames, most: int | None = None) -> list[ShownMessage]:
    """The turns' own messages, without those of more than `most` bytes. If a turn's content is damaged or deleted, each
    of its messages has the error."""
    shown: list[ShownMessage] = []
    for turn in turns:
        end = turn.message_count - 1
        try:
            contents = codec.unpack_messages(frames.get(turn.number, (None, None))[1])
        except CorruptContent as error:
            shown += [
                ShownMessage(index, turn.number, turn.agent_id, index == end, None, str(error))
                for index in range(turn.base_messages, turn.message_count)
            ]
            continue
        for index, message in enumerate(as_messages(turn.protocol, contents), turn.base_messages):
            is_long = len(message) > (most or MAX_BYTES)
            why = f"{len(message)} bytes are too many to show" if is_long else None
            raw = None if is_long else msgspec.Raw(message)
            shown.append(ShownMessage(index, turn.number, turn.agent_id, index == end, raw, why))
    return shown


def as_messages(protocol: str, said: Messages) -> list[bytes]:
    """A turn's new messages and its reply; a completion's texts become a user's and an assistant's message."""
    if shape_of(protocol) == "chat":
        return [*said.messages, said.message]
    prompt = [b'{"role":"user","content":' + text + b"}" for text in said.messages]
    return [*prompt, b'{"role":"assistant","content":' + said.message + b"}"]


def _size(shown: ShownMessage) -> int:
    return 0 if shown.message is None else len(bytes(shown.message))


def _judged(shown: ShownMessage, found: SessionAt) -> ShownMessage:
    """A reply with what was said of its turn."""
    if not shown.sampled:
        return shown
    reward = _reward(found.session.turn_rewards.get(shown.turn))
    return msgspec.structs.replace(shown, reward=reward, annotations=found.said_of(shown.turn))


def _reward(assigned: AssignedReward | None) -> dict[str, Any] | None:
    return None if assigned is None else asdict(assigned)
