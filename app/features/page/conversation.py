"""Reads a session's messages up to a turn, live or discarded, for the page."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from app.domain.branches import newest_of
from app.domain.session import Session, Turn
from app.errors import NotFound, SessionUnreadable
from app.export.rows import as_messages
from app.sessions.session_at import SessionAt, session_at
from app.store import reads
from app.store.engine import Database
from app.store.reads import Frames
from workers import codec
from workers.codec import CorruptContent

MAX_MESSAGES = 2_000
MAX_BYTES = 8 << 20
"""Limits of one reply, which has the newest messages that fit. A message over MAX_BYTES is listed without its text."""

TURNS_PER_READ = 64
"""Turns in one read, from the newest back."""


class ShownMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message with its index in the history. `sampled`: an engine generated it. If it is null, `error` says why."""

    index: int
    turn: int
    sampled: bool
    message: msgspec.Raw | None
    error: str | None = None


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
        number = _newest(found.session, branch) if turn is None else turn
        if number is None:
            return ConversationView(None, [], None, None, 0, {})
        _, event = found.turn(number)
        messages = await self._messages(found, number)
        errors: dict[str, str] = {}
        params = await self._blob(session_id, event.params, "params", errors)
        tools = None if event.tools is None else await self._blob(session_id, event.tools, "tools", errors)
        total = event.base_messages + event.new_messages + 1
        return ConversationView(number, messages, params, tools, total - len(messages), errors)

    async def _messages(self, found: SessionAt, number: int) -> list[ShownMessage]:
        """The newest messages that fit, oldest first."""
        session_id = found.session.session_id
        chain = found.session.message_chain(number)
        newest: list[ShownMessage] = []
        room = MAX_BYTES
        while chain and len(newest) < MAX_MESSAGES and room > 0:
            part, chain = chain[-TURNS_PER_READ:], chain[:-TURNS_PER_READ]
            numbers = [turn.number for turn in part]
            frames = await self._database.read(
                lambda connection: reads.load_frames(connection, session_id, numbers, tokens=False),  # noqa: B023
                session_id=session_id,
            )
            for shown in reversed(await asyncio.to_thread(_turn_messages, part, frames)):
                size = 0 if shown.message is None else len(bytes(shown.message))
                if size > room or len(newest) == MAX_MESSAGES:
                    room = 0
                    break
                room -= size
                newest.append(shown)
        newest.reverse()
        return newest

    async def _blob(self, session_id: str, number: int, name: str, errors: dict[str, str]) -> msgspec.Raw | None:
        try:
            found = await self._database.read(
                lambda c: reads.load_blobs(c, session_id, [number]), session_id=session_id
            )
        except (CorruptContent, SessionUnreadable) as error:
            errors[name] = str(error)
            return None
        return msgspec.Raw(found[number])


def _newest(session: Session, branch: int | None) -> int | None:
    if branch is None:
        return None if session.leaf is None else session.leaf.number
    try:
        return newest_of(session, branch).number
    except KeyError:
        raise unknown_branch(session, branch) from None


def unknown_branch(session: Session, branch: int) -> NotFound:
    return NotFound(f"session {session.session_id} has no branch {branch} at event {session.version}")


def _turn_messages(turns: Sequence[Turn], frames: Frames) -> list[ShownMessage]:
    """The turns' own messages. If a turn's content is damaged or deleted, each of its messages has the error."""
    shown: list[ShownMessage] = []
    for turn in turns:
        end = turn.message_count - 1
        try:
            contents = codec.unpack_messages(frames.get(turn.number, (None, None))[1])
        except CorruptContent as error:
            shown += [
                ShownMessage(index, turn.number, index == end, None, str(error))
                for index in range(turn.base_messages, turn.message_count)
            ]
            continue
        shown += [
            _shown_message(index, turn, index == end, message)
            for index, message in enumerate(as_messages(turn.protocol, contents), turn.base_messages)
        ]
    return shown


def _shown_message(index: int, turn: Turn, sampled: bool, message: bytes) -> ShownMessage:
    if len(message) > MAX_BYTES:
        return ShownMessage(index, turn.number, sampled, None, f"{len(message)} bytes are too many to show")
    return ShownMessage(index, turn.number, sampled, msgspec.Raw(message))
