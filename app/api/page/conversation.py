"""What was said in a session up to one of its turns, discarded ones too, for people."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from app.domain.session import Turn
from app.errors import SessionUnreadable
from app.export.rows import as_messages
from app.sessions.session_at import SessionAt, session_at
from app.store import reads
from app.store.engine import Database
from app.store.reads import Frames
from workers import codec
from workers.codec import CorruptContent

MAX_MESSAGES = 2_000
MAX_BYTES = 8 << 20
"""Of one answer: the newest messages that fit. A message that is larger by itself is named, not shown."""

AT_ONCE = 64
"""Turns read at a time, from the newest back."""


class Shown(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message in its place in the history; `sampled`: an engine said it. Without one, `error` says why."""

    index: int
    turn: int
    sampled: bool
    message: msgspec.Raw | None
    error: str | None = None


class ConversationView(msgspec.Struct, frozen=True):
    """`messages` up to turn `turn` (null: there is none), without the `omitted` oldest.

    `params` and `tools` are those of the turn's request, as the engine got them; `errors` says of each of the two why
    it cannot be shown.
    """

    turn: int | None
    messages: Sequence[Shown]
    params: msgspec.Raw | None
    tools: msgspec.Raw | None
    omitted: int
    errors: Mapping[str, str]


class Conversations:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def at(self, session_id: str, seq: int | None, turn: int | None) -> ConversationView:
        """Up to `turn`, None: the last live one, as of event `seq`. Raises as `session_at`, NotFound for a turn."""
        found = await session_at(self._database, session_id, seq)
        leaf = found.session.leaf
        number = turn if turn is not None else None if leaf is None else leaf.number
        if number is None:
            return ConversationView(None, [], None, None, 0, {})
        _, event = found.turn(number)
        messages = await self._messages(found, number)
        errors: dict[str, str] = {}
        params = await self._blob(session_id, event.params, "params", errors)
        tools = None if event.tools is None else await self._blob(session_id, event.tools, "tools", errors)
        total = event.base_messages + event.new_messages + 1
        return ConversationView(number, messages, params, tools, total - len(messages), errors)

    async def _messages(self, found: SessionAt, number: int) -> list[Shown]:
        """The newest that fit, oldest first."""
        session_id = found.session.session_id
        chain = found.session.message_chain(number)
        newest: list[Shown] = []
        room = MAX_BYTES
        while chain and len(newest) < MAX_MESSAGES and room > 0:
            part, chain = chain[-AT_ONCE:], chain[:-AT_ONCE]
            numbers = [turn.number for turn in part]
            frames = await self._database.read(
                lambda connection: reads.load_frames(connection, session_id, numbers, facts=False),  # noqa: B023
                session_id=session_id,
            )
            for shown in reversed(await asyncio.to_thread(_said, part, frames)):
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


def _said(turns: Sequence[Turn], frames: Frames) -> list[Shown]:
    """The turns' own messages; of a turn whose content is damaged or gone each one says so."""
    shown: list[Shown] = []
    for turn in turns:
        end = turn.message_count - 1
        try:
            said = codec.unpack_messages(frames.get(turn.number, (None, None))[1])
        except CorruptContent as error:
            shown += [
                Shown(index, turn.number, index == end, None, str(error))
                for index in range(turn.base_messages, turn.message_count)
            ]
            continue
        shown += [
            _shown(index, turn, index == end, message)
            for index, message in enumerate(as_messages(turn.protocol, said), turn.base_messages)
        ]
    return shown


def _shown(index: int, turn: Turn, sampled: bool, message: bytes) -> Shown:
    if len(message) > MAX_BYTES:
        return Shown(index, turn.number, sampled, None, f"{len(message)} bytes are too many to be shown")
    return Shown(index, turn.number, sampled, msgspec.Raw(message))
