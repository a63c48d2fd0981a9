"""The most likely tokens and the prompts' logprobs of a real engine: those that it gives to the whole row at once."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from ops.engine.process import SERVED_AS, EngineProcess
from real_engine.compared import Lane
from real_engine.test_real_engine import NEAR
from tests.tools.real_engine import weather

pytestmark = pytest.mark.real_engine

K = 5


def test_most_likely_tokens(lane: Lane, engine: EngineProcess) -> None:
    """The row's tokens as a prompt: each has its logprob there, and the most likely tokens at its place."""
    talk = lane.stand.talk(params={"top_logprobs": K})
    fields: dict[str, Any] = {"model": SERVED_AS, "max_tokens": 60, "seed": 1, "temperature": 2, "prompt_logprobs": K}
    for city in weather.CITIES[:2]:
        talk.say(weather.question(city)["content"], **fields)
    [row] = talk.rows(top_k=K)[:1]
    asked = {"model": SERVED_AS, "prompt": row["tokens"], "max_tokens": 1, "prompt_logprobs": K}
    whole = httpx.post(f"{engine.base_url}/v1/completions", json=asked, timeout=60).json()
    said: list[dict[str, Any] | None] = whole["choices"][0]["prompt_logprobs"]
    assert len(said) == len(row["tokens"])
    sampled, masked = row["sampled_mask"], row["prompt_logprobs_mask"]
    assert [int(not one) for one in sampled] == [1 if place == 0 else one for place, one in enumerate(masked)]
    missing = 0
    for place, expected in enumerate(said):
        if expected is None:
            assert set(row["top_ids"][place]) == {-1}
            continue
        token = row["tokens"][place]
        own = row["logprobs" if sampled[place] else "prompt_logprobs"][place]
        assert abs(own - expected[str(token)]["logprob"]) < NEAR
        most_likely = sorted((one["logprob"] for one in expected.values()), reverse=True)[:K]
        found = row["top_logprobs"][place]
        assert found == sorted(found, reverse=True)
        # A chat's row has the sampled token in any case, if need be in place of the least likely one.
        is_last = bool(sampled[place]) and found[-1] < most_likely[-1] - NEAR
        missing += is_last
        assert np.allclose(found[: K - is_last], most_likely[: K - is_last], atol=NEAR)
        by_id = {int(key): one["logprob"] for key, one in expected.items()}
        for one, logprob in zip(row["top_ids"][place], found, strict=True):
            assert one not in by_id or abs(by_id[one] - logprob) < NEAR
        if is_last:
            assert row["top_ids"][place][-1] == token
    print(f"{len(said)} tokens, {sum(sampled)} sampled, {missing} of them not among the {K} most likely")
