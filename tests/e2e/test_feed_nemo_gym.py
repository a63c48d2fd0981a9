"""NeMo Gym's prefix and its token-capture protocol, checked with the package's own conformance checks and builder."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from integration.stand import Stand

from e2e.feeding import audit
from turnlog import AsyncTurnlog

conformance = pytest.importorskip("nemo_gym.token_id_capture.conformance", reason="nemo-gym is not installed")
from nemo_gym.token_id_capture import TokenEntry, TokenSource  # noqa: E402
from nemo_gym.token_id_capture.consumer import trajectories_from_source  # noqa: E402

from turnlog.integrations.nemo_gym import CallMissing, TurnlogTokenCapture  # noqa: E402

pytestmark = [pytest.mark.harness, pytest.mark.long, pytest.mark.anyio]

ROLLOUTS, TURNS, KILLS = 24, 3, 8


def prefix(stand: Stand, rollout_id: str) -> str:
    return f"{stand.base_url}/ng-rollout/{rollout_id}/training-token-capture"


@pytest.fixture
async def turnlog(stand: Stand) -> AsyncIterator[AsyncTurnlog]:
    async with AsyncTurnlog(stand.base_url, retry_for_s=60) as made:
        yield made


class Calling(TurnlogTokenCapture):
    """As a sink that is handed an entry: it has the call made by an agent, which is what Turnlog stores."""

    def __init__(self, turnlog: AsyncTurnlog, stand: Stand) -> None:
        super().__init__(turnlog)
        self._stand = stand

    async def put(self, entry: TokenEntry) -> None:
        body = {
            "model": "simulator",
            "messages": [{"role": "user", "content": entry.output_items[0]["content"][0]["text"]}],
        }
        url = f"{prefix(self._stand, entry.rollout_id)}/v1/chat/completions"
        async with httpx.AsyncClient() as http:
            reply = await http.post(url, json=body, headers={"idempotency-key": entry.model_call_id})
        reply.raise_for_status()


async def test_gyms_own_checks(stand: Stand, turnlog: AsyncTurnlog) -> None:
    """All but that an entry comes back as it was put: Turnlog's entries are made of what the engine sent."""

    def sink() -> Calling:
        return Calling(turnlog, stand)

    def source() -> TokenSource:
        return TurnlogTokenCapture(turnlog)

    await conformance._check_idempotent_reput(sink(), source(), "idempotent")
    await conformance._check_conflicting_reput(sink(), source(), "conflicting")
    await conformance._check_mark_incomplete(sink(), source, "incomplete")
    await conformance._check_freeze_idempotency(sink(), source, "frozen-twice")
    await conformance._check_post_freeze_write(sink(), source(), "late-write")
    await conformance._check_conditional_retirement(sink(), source(), "retired")


async def test_gyms_builder_makes_one_chain_of_a_rollout(stand: Stand, turnlog: AsyncTurnlog) -> None:
    replies = await asyncio.to_thread(play, stand, "chain", lambda: None)
    capture = TurnlogTokenCapture(turnlog, erase=True)
    snapshot = await capture.freeze("chain")
    assert [entry.generation_token_ids for entry in snapshot.entries] == replies
    for entry in snapshot.entries:
        await capture.put(entry)
    with pytest.raises(CallMissing):
        await capture.put(
            snapshot.entries[0].model_copy(update={"generation_token_ids": [1], "generation_log_probs": [0.0]})
        )
    last = snapshot.entries[-1].model_call_id
    built = await trajectories_from_source("chain", capture, explicit_terminal_call_id=last)
    assert built is not None
    assert not built.get("mask_sample"), built
    assert built["metrics"]["chains"] == 1, built["metrics"]
    named = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
    assert built["_capture_snapshot"] == named
    assert not await capture.drop("chain", snapshot_id=snapshot.snapshot_id, version=snapshot.version + 1)
    assert await capture.drop("chain", **named)
    assert (await capture.freeze("chain")).entries == ()


def play(stand: Stand, rollout_id: str, before_turn: Callable[[], Any]) -> list[list[int]]:
    """A rollout of an agent that retries with a key, as the SDKs do; returns what the engine sampled."""
    messages: list[dict[str, Any]] = []
    sampled = []
    with httpx.Client(base_url=prefix(stand, rollout_id), timeout=30) as http:
        for turn in range(TURNS):
            before_turn()
            messages.append({"role": "user", "content": f"Step {turn}"})
            reply = send(http, {"model": "simulator", "messages": messages}, f"{rollout_id}-{turn}")
            choice = reply["choices"][0]
            messages.append(choice["message"])
            sampled.append([token[1] for token in choice["meta_info"]["output_token_logprobs"]])
    return sampled


def send(http: httpx.Client, body: dict[str, Any], key: str) -> dict[str, Any]:
    while True:
        try:
            reply = http.post("/v1/chat/completions", json=body, headers={"idempotency-key": key})
        except httpx.TransportError:
            time.sleep(0.05)
            continue
        if reply.status_code == 200:
            found: dict[str, Any] = reply.json()
            return found
        assert reply.headers.get("x-should-retry") != "false", reply.text
        time.sleep(0.05)


async def test_kills(stand: Stand, turnlog: AsyncTurnlog) -> None:
    """Turnlog is killed while the agents work; the consumer dies after each second freeze and begins again."""
    dice, done = random.Random(5), threading.Event()
    made: dict[str, list[list[int]]] = {}

    def work() -> None:
        for number in range(ROLLOUTS):
            made[f"r-{number}"] = play(stand, f"r-{number}", lambda: None)
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    kills = 0
    while not done.wait(dice.uniform(0.05, 0.6)) and kills < KILLS:
        stand.server.kill()
        stand.server.start()
        kills += 1
    await asyncio.to_thread(worker.join)
    got = []
    dropped = []
    for number, rollout_id in enumerate(made):
        snapshot = await TurnlogTokenCapture(turnlog).freeze(rollout_id)
        if number % 2:
            snapshot = await TurnlogTokenCapture(turnlog).freeze(rollout_id)
        assert not snapshot.incomplete
        got += [(rollout_id, tuple(entry.generation_token_ids), at) for at, entry in enumerate(snapshot.entries)]
        if await TurnlogTokenCapture(turnlog).drop(
            rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version
        ):
            dropped.append(rollout_id)
    expected = [(one, tuple(ids), at) for one, replies in made.items() for at, ids in enumerate(replies)]
    assert kills == KILLS
    fed = audit(expected, [one for one in expected if one[0] in dropped], got)
    assert fed == (ROLLOUTS * TURNS, ROLLOUTS * TURNS, 0, 0)
