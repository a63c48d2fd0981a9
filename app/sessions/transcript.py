"""Reassembles requests and replies from the parts that are stored once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from app.domain.calls import sendable
from app.domain.events import TurnCommitted, shape_of
from app.domain.request import chat_body, completion_body
from app.domain.session import Session, Turn
from app.fleet.engines import PATHS
from app.sessions import images
from app.sessions import replay_payloads as replay
from app.store.content import load_blobs, load_exchanges, load_messages, load_tokens
from app.store.ports import Database, of_session
from app.store.sessions import load_events
from workers import codec
from workers.codec import TOKEN_BYTES, Exchange
from workers.parse import REPLAY

INLINE = 64 << 10
"""Bytes. A record of more is put together on a thread."""


async def token_ids(database: Database, session: Session, number: int) -> bytes:
    """All token ids after turn `number`, prompt and output, as little-endian int32. Raises SessionUnreadable."""
    return await _continued(database, session, b"", session.token_chain(number))


async def _continued(database: Database, session: Session, ids: bytes, chain: Sequence[Turn]) -> bytes:
    """The tokens `ids`, followed by those of each of these turns."""
    if session.is_text:
        return b""
    numbers = [turn.number for turn in chain]
    tokens = await of_session(database, session.session_id, load_tokens, numbers)
    joined = bytearray(ids)
    for turn in chain:
        del joined[turn.base_tokens * TOKEN_BYTES :]
        joined += tokens[turn.number].suffix_ids + tokens[turn.number].output_ids
    return bytes(joined)


async def stored_reply(
    database: Database, session: Session, number: int, kinds: Collection[str]
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Status, headers and body of a committed turn's reply, byte for byte.

    Replay payloads of other kinds, and tombstoned ones, are null. Raises SessionUnreadable.
    """
    exchange = (await of_session(database, session.session_id, load_exchanges, [number]))[number]
    ids = await token_ids(database, session, number)
    payloads = await replay.values(database, session, number, exchange, kinds)
    return exchange.status, exchange.headers, codec.paste(exchange, _prompt(session.turn(number), ids), payloads)


async def echo(database: Database, session: Session, turn: Turn) -> bytes | None:
    """What the turn's reply repeats of its request, if its protocol needs that. Raises SessionUnreadable."""
    if turn.echo is None:
        return None
    return (await of_session(database, session.session_id, load_blobs, [turn.echo]))[turn.echo]


async def reply_messages(database: Database, session: Session, numbers: Sequence[int]) -> dict[int, bytes]:
    """The message of each of these turns' replies. Raises SessionUnreadable."""
    said = await of_session(database, session.session_id, load_messages, numbers)
    return {number: messages.message for number, messages in said.items()}


async def records(database: Database, session: Session, *, only_new: bool = False) -> AsyncIterator[bytes]:
    """A JSON record for each live turn, one at a time: all of them together grow with turns × context. With `only_new`
    they grow with the session's text: a request has the messages that its turn added, and tools where they are not
    those of the turn before it, null where it has none any more; nothing has prompts' ids.
    """
    async for turn in wire_turns(database, session, session.path, only_new=only_new):
        payloads = await replay.values(database, session, turn.event.turn, turn.exchange, REPLAY)
        size = len(turn.request) + len(turn.exchange.reply)
        yield await _off_the_loop(size, partial(_record, turn, payloads))


def _record(turn: WireTurn, payloads: Mapping[str, bytes]) -> bytes:
    return msgspec.json.encode(
        {
            "timestamp": turn.at,
            "request_timestamp": turn.event.requested_at,
            "method": "POST",
            "path": PATHS[shape_of(turn.event.protocol)],
            "status_code": turn.exchange.status,
            "request": msgspec.Raw(turn.request),
            "response": msgspec.Raw(turn.reply(payloads)),
            "turn": turn.event.turn,
            "protocol": turn.event.protocol,
            **({"left_out": turn.event.left_out} if turn.event.left_out else {}),
        }
    )


async def _off_the_loop(size: int, make: Callable[[], bytes]) -> bytes:
    return make() if size <= INLINE else await asyncio.to_thread(make)


class WireTurn(NamedTuple):
    """One turn as it went over the wire. `prompt` are the ids before its output, as int32, None if they were not asked
    for; `request` is the body that the engine was sent, and `messages` are those of it, raw JSON."""

    at: float
    event: TurnCommitted
    exchange: Exchange
    prompt: memoryview | None
    request: bytes
    messages: Sequence[bytes]

    def reply(self, payloads: Mapping[str, bytes]) -> bytes:
        """The body that the engine answered; null in place of replay payloads that are not given."""
        return codec.paste(self.exchange, self.prompt, payloads)


async def wire_turns(
    database: Database, session: Session, numbers: Iterable[int], *, only_new: bool = False
) -> AsyncIterator[WireTurn]:
    """These turns, one at a time. One that continues the turn before it is read without the history that they share;
    with `only_new` none has a history, the ids of its prompt, or tools that are the turn's before it.

    Raises SessionUnreadable.
    """
    committed = await _committed(database, session)
    before, history, ids, told = 0, list[bytes](), b"", None
    for number in numbers:
        turn, (at, event) = session.turn(number), committed[number]
        prompt = None
        if only_new:
            history = []
        elif event.parent != before:
            history = await _history(database, session, event.parent) if event.base_messages else []
            ids = await token_ids(database, session, event.parent) if event.base_tokens else b""
        exchange = (await of_session(database, session.session_id, load_exchanges, [number]))[number]
        if not only_new:
            ids = await _continued(database, session, ids, [turn])
            prompt = _prompt(turn, ids)
        request, history = await _request(database, session, event, told, exchange, history, prompt)
        yield WireTurn(at, event, exchange, prompt, request, history[:-1])
        before, told = number, event.tools if only_new else None


async def _history(database: Database, session: Session, number: int) -> list[bytes]:
    """All messages after turn `number`, its reply too, with their images. Raises SessionUnreadable."""
    numbers = [turn.number for turn in session.message_chain(number)]
    said = await of_session(database, session.session_id, load_messages, numbers)
    messages = [raw for number in numbers for raw in (*said[number].messages, said[number].message)]
    return [*await images.put_back(database, session, messages)]


async def _request(
    database: Database,
    session: Session,
    event: TurnCommitted,
    told: int | None,
    exchange: Exchange,
    history: list[bytes],
    prompt: memoryview | None,
) -> tuple[bytes, list[bytes]]:
    """The request as the engine received it, without ids if there is no `prompt` and without tools if they are the blob
    `told`; and the history that the next turn continues. Raises SessionUnreadable."""
    tools = None if event.tools == told else event.tools
    numbers = [event.params] if tools is None else [event.params, tools]
    blobs = await of_session(database, session.session_id, load_blobs, numbers)
    new = await images.put_back(database, session, exchange.messages)
    messages = [*(history if event.base_messages else []), *new]

    def body() -> bytes:
        sent = messages
        ids = codec.render_ids(prompt, ",")[1:-1] if event.sent_ids and prompt is not None else None
        params = blobs[event.params]
        if shape_of(event.protocol) != "chat":
            text = "".join(msgspec.json.decode(part, type=str) for part in messages)
            return b"".join(completion_body(params, text, ids, exchange.rid, exchange.own))
        if any(turn.odd_arguments for turn in session.turns):
            sent = [sendable(raw) for raw in messages]
        if exchange.beginning:
            sent = [*sent, exchange.beginning]
        field = exchange.ids_field or "input_ids"
        sent_tools = blobs[tools] if tools is not None else b"null" if event.tools != told else None
        return b"".join(chat_body(params, sent_tools, sent, exchange.rid, exchange.own, ids, field))

    size = sum(map(len, messages)) + (0 if prompt is None else prompt.nbytes)
    return await _off_the_loop(size, body), [*messages, exchange.message]


def _prompt(turn: Turn, ids: bytes) -> memoryview:
    return memoryview(ids)[: (turn.token_count - turn.output_tokens) * TOKEN_BYTES].cast("i")


async def _committed(database: Database, session: Session) -> dict[int, tuple[float, Any]]:
    """The commit event and time of each turn."""
    events = await of_session(database, session.session_id, load_events)
    return {
        recorded.event.turn: (recorded.at, recorded.event)
        for recorded in events
        if isinstance(recorded.event, TurnCommitted)
    }
