"""Reads some turns of a session for the page: their actions in lines, one turn's messages, and where a text is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from sqlalchemy import Connection, select

from app.domain.request import as_raw
from app.errors import NotFound, SessionNotFound
from app.sessions.conversation import as_messages
from app.store.database import Database
from app.store.schema import turns
from app.store.sessions import last_seq
from turnlog.actions import Action, actions_of, has_failed, result_line
from workers import codec
from workers.codec import CorruptContent, Messages

if TYPE_CHECKING:
    from app.turn.in_flight import Claimed

MAX_TURNS = 100
"""Turns whose actions are read at once."""

MAX_LINES = 6
"""Actions, and results, of one turn that are listed; the first ones."""

WHOLE_BYTES = 64 << 10
HEAD_CHARACTERS = 4_000
"""Of a message of more than WHOLE_BYTES each text is cut to this length, unless the whole message is asked for."""

MAX_BYTES = 8 << 20
"""A longer message is not shown, and not searched."""

MAX_FOUND = 1_000


class ResultLine(msgspec.Struct, frozen=True):
    """A message that a turn's request brought, such as a tool's result. `failed`: the call looks as if it failed."""

    role: str
    text: str
    failed: bool


class TurnActions(msgspec.Struct, frozen=True):
    """What a turn did, and the new messages of its request; `error` says why its messages cannot be read."""

    turn: int
    actions: Sequence[Action]
    results: Sequence[ResultLine]
    error: str | None = None


class TurnMessage(msgspec.Struct, frozen=True):
    """A message of `bytes` bytes; `cut`: its texts end early. Without one, `error` says why."""

    sampled: bool
    bytes: int
    cut: bool
    message: msgspec.Raw | None
    error: str | None = None


class TurnMessages(msgspec.Struct, frozen=True):
    """A turn's own messages: what its request added to the history, then its reply.

    `state` is null once it has committed; of a turn in flight, at this process, it is the stage that it is in, and
    `engine` the one that generates.
    """

    turn: int
    messages: Sequence[TurnMessage]
    state: str | None = None
    engine: str | None = None


class Found(msgspec.Struct, frozen=True):
    """The first MAX_FOUND turns whose replies have what was looked for, and those whose requests brought it."""

    turns: Sequence[int]
    brought: Sequence[int]


class _Row(NamedTuple):
    turn: int
    protocol: str
    exchange: bytes | None

    def messages(self) -> list[bytes]:
        """Its own messages as JSON, the reply last. Raises CorruptContent, also if they are erased."""
        return as_messages(self.protocol, codec.unpack_messages(self.exchange))


class TurnViews:
    """`claimed` finds a turn in flight at this process by its session and number; `engine_of` its engine."""

    def __init__(
        self, database: Database, claimed: Callable[[str, int], Claimed | None], engine_of: Callable[[str], str | None]
    ) -> None:
        self._database = database
        self._claimed = claimed
        self._engine_of = engine_of

    async def actions(self, session_id: str, start: int, limit: int) -> list[TurnActions]:
        """Of the committed turns with numbers [start, start + limit), discarded ones too.

        Raises SessionNotFound, SessionUnreadable, StoreUnavailable.
        """
        rows = await self._rows(session_id, start, limit)
        return await asyncio.to_thread(lambda: [_actions(row) for row in rows])

    async def messages(self, session_id: str, turn: int, *, whole: bool) -> TurnMessages:
        """Raises NotFound for a turn that has neither committed nor is in flight here, and as `actions`."""
        rows = await self._rows(session_id, turn, 1)
        if rows:
            return TurnMessages(turn, await asyncio.to_thread(_messages, rows[0], whole))
        claimed = self._claimed(session_id, turn)
        if claimed is None:
            raise NotFound(f"turn {turn} of session {session_id} has no messages here")
        flight, call = claimed.flight, claimed.call
        protocol, sent = claimed.opened.protocol, Messages([] if call is None else list(call.stored), b"null")
        state = "gate" if flight.is_at_gate else flight.stages.marks[-1][0].name.lower()
        engine = self._engine_of(claimed.rid)
        messages = await asyncio.to_thread(
            lambda: [_message(message, False, whole) for message in as_messages(protocol, sent)[:-1]]
        )
        return TurnMessages(turn, messages, state, engine)

    async def find(self, session_id: str, text: str | None, after: int) -> Found:
        """Turns after turn `after` whose own messages have `text`, in any case; without a text, those whose request
        brought a result that looks like an error. Raises as `actions`."""
        newest = select(turns.c.turn).where(turns.c.session_id == session_id).order_by(turns.c.turn.desc()).limit(1)
        last = await self._database.read(lambda c: c.execute(newest).scalar() or 0, session_id=session_id)
        needle = None if text is None else text.casefold()

        def has(message: object) -> bool:
            if needle is None:
                return has_failed(message)
            return any(needle in one.casefold() for one in _texts(message))

        replied: list[int] = []
        brought: list[int] = []
        for start in range(after + 1, max(last, after + 1) + 1, MAX_TURNS):
            rows = await self._rows(session_id, start, MAX_TURNS)
            of_reply, of_request = await asyncio.to_thread(_found, rows, has)
            replied += of_reply
            brought += of_request
            if len(replied) + len(brought) >= MAX_FOUND:
                break
        return Found(replied[:MAX_FOUND], brought[:MAX_FOUND])

    async def _rows(self, session_id: str, start: int, limit: int) -> list[_Row]:
        def read(connection: Connection) -> list[_Row]:
            query = (
                select(turns.c.turn, turns.c.protocol, turns.c.exchange)
                .where(turns.c.session_id == session_id, turns.c.turn >= start, turns.c.turn < start + limit)
                .order_by(turns.c.turn)
            )
            rows = [_Row(*row) for row in connection.execute(query)]
            if not rows and not last_seq(connection, session_id):
                raise SessionNotFound.of(session_id)
            return rows

        return await self._database.read(read, session_id=session_id)


def _actions(row: _Row) -> TurnActions:
    try:
        *brought, reply = (_decoded(message) for message in row.messages())
    except CorruptContent as error:
        return TurnActions(row.turn, [], [], str(error))
    # Behind a first turn's system prompt stands what it is about, and at the end what is new.
    shown = [message for message in brought if _role(message) not in ("system", "developer", "assistant")] or brought
    results = [ResultLine(_role(message), result_line(message), has_failed(message)) for message in shown[-MAX_LINES:]]
    return TurnActions(row.turn, actions_of([reply])[:MAX_LINES], results)


def _messages(row: _Row, whole: bool) -> list[TurnMessage]:
    try:
        messages = row.messages()
    except CorruptContent as error:
        return [TurnMessage(True, 0, False, None, str(error))]
    last = len(messages) - 1
    return [_message(message, at == last, whole) for at, message in enumerate(messages)]


def _message(message: bytes, sampled: bool, whole: bool) -> TurnMessage:
    size = len(message)
    if size > MAX_BYTES:
        return TurnMessage(sampled, size, False, None, f"{size} bytes are too many to show")
    if whole or size <= WHOLE_BYTES:
        return TurnMessage(sampled, size, False, msgspec.Raw(message))
    return TurnMessage(sampled, size, True, as_raw(_head(msgspec.json.decode(message))))


def _head(value: object) -> object:
    """The same with each text cut to HEAD_CHARACTERS, each list to as many items."""
    if isinstance(value, str):
        return value[:HEAD_CHARACTERS]
    if isinstance(value, list):
        return [_head(item) for item in value[:HEAD_CHARACTERS]]
    return {name: _head(item) for name, item in value.items()} if isinstance(value, dict) else value


def _found(rows: Sequence[_Row], has: Callable[[object], bool]) -> tuple[list[int], list[int]]:
    """The turns whose replies have it, and those whose requests brought it."""
    searched = {row.turn: _searched(row) for row in rows}
    replied = [turn for turn, messages in searched.items() if has(messages[-1])]
    return replied, [turn for turn, messages in searched.items() if any(map(has, messages[:-1]))]


def _searched(row: _Row) -> list[object]:
    """A turn's messages, the reply last; None for one that is not searched: it is too long, or cannot be read."""
    try:
        return [_decoded(message) if len(message) <= MAX_BYTES else None for message in row.messages()]
    except CorruptContent:
        return [None]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _decoded(message: bytes) -> object:
    """Raises CorruptContent."""
    try:
        return msgspec.json.decode(message)
    except msgspec.MsgspecError as error:
        raise CorruptContent(f"a stored message is no JSON: {error}") from error


def _role(message: object) -> str:
    return str(message.get("role", "?")) if isinstance(message, dict) else "?"
