"""Turns with tools, streams and completions at a real engine, over kills of the server."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import httpx
import pytest
from integration.stand import Stand, until

from ops.server import OwnProcess
from real_engine.clients import Chat, Client, Ids, Messages, Responses, Text, ToolLoop
from real_engine.compared import Lane, compare
from real_engine.table import Found

KINDS = [
    pytest.param("vllm", marks=pytest.mark.real_engine),
    pytest.param("sglang", marks=pytest.mark.real_sglang),
]
pytestmark = pytest.mark.parametrize("kind", KINDS, indirect=True)

CONVERSATIONS = int(os.environ.get("REAL_ENGINE_CONVERSATIONS", "4"))
"""With tools, at the same time."""

KILLS = 3
BETWEEN = 4
"""Generations that begin between two kills."""

PATIENCE_S = 30.0 * CONVERSATIONS
NEAR = 1e-4
"""How far an exported logprob may be from the model's own, in nats."""


@pytest.mark.parametrize("protocol", [Chat, Messages, Responses])
def test_tools(lane: Lane, protocol: type[ToolLoop], found: Found) -> None:
    """Qwen3's template drops reasoning: only with a tokenizer here does what was sampled go on in one row."""
    clients = [protocol(lane.stand, number) for number in range(CONVERSATIONS)]
    run_over_kills(lane, clients, found)
    require_equal(lane, clients, found)
    assert sum(client.tool_calls for client in clients) > len(clients), "the model hardly calls its tool"
    assert found.rows == found.sessions if lane.builds_prompts else found.rows > found.sessions


@pytest.mark.parametrize("lane", ["tito"], indirect=True)
def test_tools_over_updates(lane: Lane, engine: OwnProcess, found: Found) -> None:
    """What a pause aborts goes on after the update, beside kills of the server."""
    until(lambda: lane.stand.http.get("/engines").json()["engines"][0]["weight_version"] is not None, PATIENCE_S)
    clients = [Chat(lane.stand, number) for number in range(CONVERSATIONS)]
    run_over_kills(lane, clients, found, partial(update, lane.stand, engine))
    require_equal(lane, clients, found)
    rows = [row for client in clients for row in client.talk.rows()]
    assert found.rows == found.sessions
    assert found.joined > 0, "no pause met a turn in flight"
    assert {str(version) for row in rows for version in row["weight_versions"] if version >= 0} >= {"1", str(KILLS)}


def update(stand: Stand, engine: OwnProcess, number: int) -> None:
    """Update the weights' version behind a pause, which aborts what is in flight."""
    assert stand.http.post("/fleet/pause").status_code == 200
    updated = httpx.post(engine.base_url + "/update_weight_version", json={"new_version": str(number)})
    assert updated.status_code == 200, updated.text
    assert stand.http.post("/fleet/resume").status_code == 200


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


def run_over_kills(
    lane: Lane, clients: Sequence[Client], found: Found, meanwhile: Callable[[int], None] | None = None
) -> None:
    """Kill the server while the clients' turns are in flight; the clients go on by themselves. `meanwhile` is done
    between two kills, also with turns in flight; it gets their number, from 1."""
    runs = [lane.stand.meanwhile(client.run) for client in clients]
    for number in range(1, KILLS + 1):
        until(partial(has_begun, lane, runs, len(lane.proxy.requests) + BETWEEN), PATIENCE_S)
        if meanwhile is not None:
            meanwhile(number)
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
