"""What clients do that share a session and do not wait for each other. What they are answered, the search judges."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from app.errors import AppError, SessionClosed, SessionNotFound
from tests.tools.simulation.calls import Chat
from tests.tools.simulation.process import Disconnected
from tests.tools.simulation.spelling import Message

if TYPE_CHECKING:
    from tests.tools.simulation.client import Client

RUSH_S = 3.0
"""Between the moments at which many clients act."""


async def go_back(client: Client) -> None:
    """Another turn in the newest one's place."""
    del client.messages[-2:]
    await client.turn()


async def twice(client: Client) -> None:
    """A keyed turn, sent to two processes at once."""
    messages, logical = _new(client, client.messages)
    await asyncio.gather(*(_send(client, messages, logical, logical) for _ in range(2)))


async def again(client: Client) -> None:
    """A keyed turn, and once it was answered the same again."""
    messages, logical = _new(client, client.messages)
    for _ in range(2):
        await _send(client, messages, logical, logical)


async def rush(client: Client) -> None:
    """Turns and rewards at once, at any processes, just when others do the same. One turn comes behind a reward: so its
    process knows of the other one."""
    await asyncio.sleep(RUSH_S - client._history.now() % RUSH_S)
    turns = [_new(client, client.messages) for _ in range(2)]

    async def send(messages: list[Message], logical: str, rewards: int) -> None:
        client._sticky = None
        for _ in range(rewards):
            await client.insist(client._reward, 1)
        await _send(client, messages, logical, None)

    await asyncio.gather(
        *(send(*turn, rewards) for rewards, turn in enumerate(turns)), client.insist(client._reward, 1)
    )


async def earlier(client: Client) -> None:
    """One of the session's newest requests once more, whoever sent it, without a mark unless it had a key."""
    asked = [one for one in client._history.asked.get(client.session_id, ()) if isinstance(one.request, Chat)]
    if not asked:
        return
    again = client._rng.choice(asked[-6:])
    assert isinstance(again.request, Chat)
    messages: list[Message] = [{"role": role, "content": text} for role, text in again.request.messages]
    turn = again.turn
    assert turn is not None
    await _send(client, messages, messages[-1]["content"], None, agent=turn.agent_id, hashed=turn.retry_key)


async def back(client: Client) -> None:
    """A turn after what was there some turns ago."""
    before = client.messages[: max(0, len(client.messages) - 2 * client._rng.choice((1, 2, 3)))]
    await _send(client, *_new(client, before), None)


async def other(client: Client) -> None:
    """A turn that begins another conversation."""
    await _send(client, *_new(client, []), None)


def _new(client: Client, before: Sequence[Message]) -> tuple[list[Message], str]:
    client._asked += 1
    logical = f"{client.name}.{client._asked}"
    return [*before, {"role": "user", "content": logical}], logical


async def _send(
    client: Client,
    messages: list[Message],
    logical: str,
    key: str | None,
    agent: str | None = None,
    hashed: str | None = None,
) -> None:
    """Once, whatever comes of it; the client goes on from a reply. `hashed` is a key as the log has it.

    Raises SessionClosed, SessionNotFound.
    """
    turn = client._turn(key, agent)
    turn.retry_key = turn.retry_key or hashed
    try:
        reply = await client._ask(lambda: client._take(messages, logical, key, turn))
    except (SessionClosed, SessionNotFound):
        raise
    except (AppError, Disconnected, TimeoutError) as error:
        client._note(f"{client.name}: {logical} failed: {type(error).__name__} {error}")
        return
    if reply.turn is not None:
        client.messages = [*messages, msgspec.json.decode(b"".join(reply.parts))["choices"][0]["message"]]
