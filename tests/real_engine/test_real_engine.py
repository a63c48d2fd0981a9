"""Turns with tools, streams and completions at a real engine, over kills of the server."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import pytest
from integration.stand import error_of, until

from real_engine.clients import Chat, Client, Ids, Messages, Responses, Text, ToolLoop
from real_engine.compared import Lane, compare
from real_engine.table import Found
from tests.tools.real_engine import weather
from tests.tools.real_engine.process import SERVED_AS

pytestmark = pytest.mark.real_engine

KILLS = 3
BETWEEN = 4
"""Generations that begin between two kills."""

PATIENCE_S = 120.0
NEAR = 1e-4
"""How far an exported logprob may be from the model's own, in nats."""


@pytest.mark.parametrize("protocol", [Chat, Messages, Responses])
@pytest.mark.parametrize("lane", ["capture"], indirect=True)
def test_tools(lane: Lane, protocol: type[ToolLoop], found: Found) -> None:
    clients = [protocol(lane.stand, number) for number in range(4)]
    run_over_kills(lane, clients, found)
    require_equal(lane, clients, found)
    assert sum(client.tool_calls for client in clients) > len(clients), "the model hardly calls its tool"
    assert found.rows > found.sessions, "Qwen3's template drops reasoning: what was sampled does not go on in one row"


def test_plain_chats(lane: Lane, found: Found) -> None:
    clients = [Chat(lane.stand, number, plain=True) for number in range(4)]
    run_over_kills(lane, clients, found)
    require_equal(lane, clients, found)
    assert found.rows == found.sessions, "Each prompt goes on from the tokens before it."


def test_completions(lane: Lane, found: Found) -> None:
    ids = [Ids(lane.stand, number, model=lane.model) for number in range(4)]
    clients = [*ids, *(Text(lane.stand, number) for number in range(4))]
    run_over_kills(lane, clients, found)
    require_equal(lane, clients, found)
    for client in ids:
        [row] = client.talk.rows()
        assert row["tokens"] == client.ids


@pytest.mark.parametrize("lane", ["tito"], indirect=True)
def test_a_prompt_that_the_engine_renders_otherwise_is_refused(lane: Lane, found: Found) -> None:
    """vLLM's chat ignores the ids that it is sent: where its own rendering differs, nothing is recorded."""
    client = Chat(lane.stand, 1, plain=True)
    client.ask(weather.question("Oslo", aloud=True), "Oslo")
    assert "</think>" in client.messages[-1]["content"]
    asked = [*client.messages, weather.question("Lima")]
    refused = client.talk.chat(asked, model=SERVED_AS, max_tokens=20)
    assert error_of(refused) == (500, "token_prefix_mismatch")
    require_equal(lane, [client], found)


def run_over_kills(lane: Lane, clients: Sequence[Client], found: Found) -> None:
    """Kill the server while the clients' turns are in flight; the clients go on by themselves."""
    runs = [lane.stand.meanwhile(client.run) for client in clients]
    for _ in range(KILLS):
        until(partial(has_begun, lane, runs, len(lane.proxy.requests) + BETWEEN), PATIENCE_S)
        lane.stand.server.kill()
        found.kills += 1
        lane.stand.server.start()
    for run in runs:
        run.result(timeout=PATIENCE_S)
    assert sum(client.talk.types().count("TurnAbandoned") for client in clients) > 0, "no kill met a turn in flight"


def has_begun(lane: Lane, runs: Sequence[Future[None]], generations: int) -> bool:
    """Have so many? Raises what a client raised."""
    for run in runs:
        if run.done():
            run.result()
    return len(lane.proxy.requests) >= generations


def require_equal(lane: Lane, clients: Sequence[Client], found: Found) -> None:
    compare(lane, clients, found)
    assert (found.lost, found.doubled, found.wrong_ids, found.wrong_logprobs) == (0, 0, 0, 0)
    assert found.difference < NEAR
