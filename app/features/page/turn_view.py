"""Reads some turns of a session for the page: their actions in lines, their messages, and where a text is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from sqlalchemy import Connection, select

from app.domain.request import as_raw
from app.errors import SessionNotFound
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

MOST_READ = 1 << 20
"""Bytes of messages in one reply; a longer turn is alone in one."""

MAX_LINES = 6
"""Actions, and results, of one turn that are listed; the first ones."""

WHOLE_BYTES = 64 << 10
HEAD_CHARACTERS = 4_000
"""Of a message of more than WHOLE_BYTES each text is cut to this length, unless the whole message is asked for."""

MAX_BYTES = 8 << 20
"""A longer message is not shown, and not searched."""

MAX_FOUND = 1_000

RESULTS = frozenset({"tool", "function"})
"""Roles of messages that the page shows under the call that they answer."""


class ResultLine(msgspec.Struct, frozen=True):
    """A message that a turn's request brought, such as a tool's result. `failed`: the call looks as if it failed."""

    role: str
    text: str
    failed: bool


class TurnActions(msgspec.Struct, frozen=True):
    """What a turn did, and the new messages of its request, of which `failed` look like errors; `error` says why its
    messages cannot be read."""

    turn: int
    actions: Sequence[Action]
    results: Sequence[ResultLine]
    failed: int = 0
    error: str | None = None


class TurnMessage(msgspec.Struct, frozen=True):
    """A message of `bytes` bytes; `cut`: its texts end early. Without one, `error` says why.

    `failed`: it is a result that looks like an error.
    """

    sampled: bool
    bytes: int
    cut: bool
    message: msgspec.Raw | None
    failed: bool = False
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
    """The first MAX_FOUND turns that have what was looked for, and those whose requests brought it in a result."""

    turns: list[int]
    brought: list[int]


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

    async def messages(self, session_id: str, start: int, limit: int, *, whole: bool) -> list[TurnMessages]:
        """Of the turns with numbers [start, start + limit), those that have committed or are in flight here: the first
        ones, of MOST_READ bytes in all. Raises as `actions`."""
        rows = await self._rows(session_id, start, limit)
        found = await asyncio.to_thread(_read, rows, whole)
        if len(found) < len(rows):
            return found
        committed = {row.turn for row in rows}
        for turn in range(start, start + limit):
            claimed = None if turn in committed else self._claimed(session_id, turn)
            if claimed is not None:
                found.append(await self._of_claimed(turn, claimed, whole))
        return found

    async def _of_claimed(self, turn: int, claimed: Claimed, whole: bool) -> TurnMessages:
        flight, call = claimed.flight, claimed.call
        protocol, sent = claimed.opened.protocol, Messages([] if call is None else list(call.stored), b"null")
        state = "gate" if flight.is_at_gate else flight.stages.marks[-1][0].name.lower()
        messages = await asyncio.to_thread(
            lambda: [_message(message, False, whole) for message in as_messages(protocol, sent)[:-1]]
        )
        return TurnMessages(turn, messages, state, self._engine_of(claimed.rid))

    async def find(self, session_id: str, text: str) -> Found:
        """The turns whose own messages have `text`, in any case. Raises as `actions`."""
        newest = select(turns.c.turn).where(turns.c.session_id == session_id).order_by(turns.c.turn.desc()).limit(1)
        last = await self._database.read(lambda c: c.execute(newest).scalar() or 0, session_id=session_id)
        found = Found([], [])
        for start in range(1, max(last, 1) + 1, MAX_TURNS):
            rows = await self._rows(session_id, start, MAX_TURNS)
            await asyncio.to_thread(_find, rows, text.casefold(), found)
            if len(found.turns) + len(found.brought) >= MAX_FOUND:
                break
        return Found(found.turns[:MAX_FOUND], found.brought[:MAX_FOUND])

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
        return TurnActions(row.turn, [], [], error=str(error))
    # Behind a first turn's system prompt stands what it is about, and at the end what is new.
    shown = [message for message in brought if _role(message) not in ("system", "developer", "assistant")] or brought
    results = [ResultLine(_role(message), result_line(message), has_failed(message)) for message in shown[-MAX_LINES:]]
    return TurnActions(row.turn, actions_of([reply])[:MAX_LINES], results, sum(map(has_failed, brought)))


def _read(rows: Sequence[_Row], whole: bool) -> list[TurnMessages]:
    """The first ones that fit."""
    found: list[TurnMessages] = []
    room = MOST_READ
    for row in rows:
        messages = _messages(row, whole)
        room -= sum(len(bytes(one.message or b"")) for one in messages)
        if found and room < 0:
            break
        found.append(TurnMessages(row.turn, messages))
    return found


def _messages(row: _Row, whole: bool) -> list[TurnMessage]:
    try:
        *brought, reply = row.messages()
        return [*(_message(message, False, whole) for message in brought), _message(reply, True, whole)]
    except CorruptContent as error:
        return [TurnMessage(True, 0, False, None, error=str(error))]


def _message(message: bytes, sampled: bool, whole: bool) -> TurnMessage:
    size = len(message)
    if size > MAX_BYTES:
        return TurnMessage(sampled, size, False, None, error=f"{size} bytes are too many to show")
    decoded = _decoded(message)
    is_cut = size > WHOLE_BYTES and not whole
    shown = as_raw(_head(decoded)) if is_cut else msgspec.Raw(message)
    return TurnMessage(sampled, size, is_cut, shown, not sampled and has_failed(decoded))


def _head(value: object) -> object:
    """The same with each text cut to HEAD_CHARACTERS, each list to as many items."""
    if isinstance(value, str):
        return value[:HEAD_CHARACTERS]
    if isinstance(value, list):
        return [_head(item) for item in value[:HEAD_CHARACTERS]]
    return {name: _head(item) for name, item in value.items()} if isinstance(value, dict) else value


def _find(rows: Sequence[_Row], needle: str, found: Found) -> None:
    """Add what these turns have."""
    for row in rows:
        having = [message for message in _searched(row) if any(needle in one.casefold() for one in _texts(message))]
        roles = {_role(message) for message in having}
        if roles & RESULTS:
            found.brought.append(row.turn)
        if roles - RESULTS:
            found.turns.append(row.turn)


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
        raise CorruptContent(f"a stored message is not JSON: {error}") from error


def _role(message: object) -> str:
    return str(message.get("role", "?")) if isinstance(message, dict) else "?"
