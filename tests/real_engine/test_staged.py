"""A long generation of a real engine goes on after `kill -9` of the server, or of the engine."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import httpx
import pytest
from fault.verified import acknowledgement, verified
from integration.patient import answered
from integration.stand import Stand, Talk, serving, until, user
from integration.tito import output_of

from ops.engine.process import SERVED_AS, EngineProcess
from tests.tools.real_engine.models import rescored

pytestmark = pytest.mark.real_engine

KILLS = int(os.environ.get("REAL_ENGINE_KILLS", "2"))
TOKENS = 2000 if KILLS >= 5 else 600
NEAR = 1e-3
"""Largest difference of a logprob from what transformers computes, in nats."""

PATIENCE_S = 900.0


def ask(stand: Stand, talk: Talk) -> httpx.Response:
    limits = {"max_tokens": TOKENS, "min_tokens": TOKENS, "ignore_eos": True}
    body = talk.body([user("Tell me everything.")], model=SERVED_AS, temperature=0, **limits)
    return answered(stand, talk, body, PATIENCE_S)


def staged_turns(stand: Stand, outcome: str = "staged") -> float:
    """How many turns of this process have tokens that a retry can go on from; `restored`: how many have gone on."""
    text = stand.http.get("/metrics").text
    found = [line for line in text.splitlines() if line.startswith(f'turnlog_turns_staged_total{{outcome="{outcome}"')]
    return sum(float(line.split()[-1]) for line in found)


@pytest.mark.parametrize("killed", ["server", "engine"])
def test_a_generation_outlives_kills(engine: EngineProcess, model: Path, tmp_path: Path, killed: str) -> None:
    rng = random.Random(killed)
    environment = {"TURNLOG_UPSTREAM_DIALECT": "vllm", "TURNLOG_STAGE_TOKENS_S": "0.25", "TURNLOG_LEASE_S": "1"}
    with serving(tmp_path, engine.base_url, environment=environment) as stand:
        began = time.monotonic()
        whole = ask(stand, stand.talk())
        took = time.monotonic() - began
        talk, before = stand.talk(), staged_turns(stand)
        asked = stand.meanwhile(ask, stand, talk)
        until(lambda: staged_turns(stand) > before, PATIENCE_S)
        kills = 0
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.3, 1.0) * took / (KILLS + 1))
            if asked.done():
                break
            kills += 1
            process = stand.server if killed == "server" else engine
            process.kill()
            process.start()
        response = asked.result(timeout=PATIENCE_S)
        parts = talk.committed()[0].get("parts", [])
        scored = rescored(model, talk.rows())
        print(f"{killed}: {kills} kills, {TOKENS} tokens in {took:.0f} s, parts {parts}, {scored}")
        assert kills > 0
        assert parts
        assert output_of(response.json()) == output_of(whole.json())
        assert response.json()["choices"][0]["message"]["content"] == whole.json()["choices"][0]["message"]["content"]
        assert scored.largest < NEAR
        verified(stand, [acknowledgement(talk.id, response)])
