"""What a process is asked, written down with what it answers: in the process, whether or not its client hears of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from app.errors import AppError, ClientGone
from app.protocols.registry import PROTOCOLS
from app.turn.in_flight import InFlightTurn, TurnReply
from tests.tools.simulation import calls, refusals
from tests.tools.simulation.calls import Chat, Refused, Shown, Taken
from tests.tools.simulation.history import bare
from tests.tools.simulation.process import Process
from tests.tools.simulation.spelling import Message
from tests.tools.simulation.world import World

T = TypeVar("T")


async def take(
    world: World, process: Process, turn: InFlightTurn, messages: Sequence[Message], body: bytes
) -> TurnReply:
    """The process takes a turn. A refusal because of another turn is judged at once. Raises as `Turns.take`."""
    chat = Chat(_told(messages), _hash(body), turn.retry_key, turn.agent_id, turn.retry_count)
    version = world.store.read(lambda connection: refusals.version_of(connection, turn.session_id))
    asked = world.history.ask(turn.session_id, chat, process.name, turn, version)
    try:
        return await world.history.answer(asked, process.service.turns.take(turn, PROTOCOLS["chat"], body), _taken)
    except AppError as error:
        if world.theme == "fights":
            refusals.check(world, asked, error)
        if error.status < 500 and not turn.has_client:
            asked.reply = Refused(ClientGone.status, ClientGone.code)  # What it would have been told is open.
        raise


async def call(
    world: World,
    process: Process,
    session_id: str,
    request: calls.Request,
    work: Callable[[], Coroutine[Any, Any, T]],
    reply: Callable[[T], calls.Reply] = lambda _: calls.Done(),
) -> T:
    """The process does something else. Raises as the work."""
    return await world.history.answer(world.history.ask(session_id, request, process.name), work(), reply)


def shown(messages: Sequence[Message]) -> Shown:
    return Shown(_told(messages))


def _told(messages: Sequence[Message]) -> tuple[calls.Message, ...]:
    return tuple((message["role"], message["content"]) for message in messages)


def _hash(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:12]


def _taken(reply: TurnReply) -> calls.Reply:
    if reply.turn is None:
        return Refused(reply.status, "upstream_error")
    body = b"".join(reply.parts)
    text = msgspec.json.decode(body)["choices"][0]["message"]["content"]
    return Taken(reply.turn, text, _hash(bare(body)), reply.replayed)
