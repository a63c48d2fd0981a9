"""A live stream of a real engine is put together into the reply that it sends as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from helpers.streams import assembled, chunks
from integration.stand import Stand, Talk, serving

from ops.engine.process import SERVED_AS, EngineProcess
from tests.tools.real_engine import weather

pytestmark = pytest.mark.real_engine

NEAR = 1e-4
"""How far two logprobs of the same token may be apart, in nats: the engine computes them in other batches."""

SEEDS = range(12)


@pytest.fixture
def stand(engine: EngineProcess, tmp_path: Path) -> Iterator[Stand]:
    with serving(tmp_path, engine.base_url, environment={"TURNLOG_UPSTREAM_DIALECT": "vllm"}) as made:
        yield made


def is_cut(seed: int) -> bool:
    return seed % 4 == 3


def turn(talk: Talk, seed: int, **fields: Any) -> str:
    asked = {"model": SERVED_AS, "max_tokens": 12 if is_cut(seed) else 150, "seed": seed, "temperature": 0.7, **fields}
    if seed % 3:
        asked["tools"] = [weather.TOOL]
    response = talk.chat([weather.question(weather.CITIES[seed % len(weather.CITIES)], aloud=seed % 2 == 1)], **asked)
    assert response.status_code == 200, response.text
    return response.text


def reply_of(talk: Talk) -> tuple[dict[str, Any], list[float]]:
    """The stored reply without what no two replies share, and its logprobs."""
    [record] = talk.state()["records"]
    reply = record["response"]
    [choice] = reply["choices"]
    for call in choice["message"].get("tool_calls") or ():
        del call["id"]
    logprobs = [one.pop("logprob") for one in choice["logprobs"]["content"]]
    return without_nulls({name: one for name, one in reply.items() if name not in ("id", "created")}), logprobs


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one not in (None, [])}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def test_a_live_stream_is_the_reply_that_comes_whole(stand: Stand) -> None:
    calls = chunks_seen = 0
    for seed in SEEDS:
        whole, live = stand.talk(), stand.talk(stream_mode="live")
        turn(whole, seed)
        streamed = turn(live, seed, stream=True)
        (one, expected), (other, found) = reply_of(whole), reply_of(live)
        if is_cut(seed):
            # vLLM's parser reads a call that was cut as text, but in a stream as a call that has begun.
            del one["choices"][0]["message"], other["choices"][0]["message"]
        assert other == one
        assert max(abs(a - b) for a, b in zip_longest(found, expected, fillvalue=9.0)) < NEAR
        [record] = live.state()["records"]
        message = record["response"]["choices"][0]["message"]
        read = assembled(streamed)["choices"][0]["message"]
        assert without_nulls(read["content"]) == without_nulls(message["content"])
        calls += len(message.get("tool_calls") or ())
        chunks_seen += len(chunks(streamed))
        assert [row["tokens"] for row in live.rows()] == [row["tokens"] for row in whole.rows()]
    assert calls
    assert chunks_seen > 10 * len(SEEDS)
