"""The simulator's prefix cache, and its switches for failures."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from helpers.amounts import cases

from ops.simulator.app import Simulator
from ops.simulator.config import Config
from ops.simulator.prefixes import PrefixCache

CHAT = "/v1/chat/completions"
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def packed(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def leading(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(map(len, (one, other)))
    )


def test_against_a_list_of_all_sequences() -> None:
    """While nothing is dropped, a hit is the longest prefix that any sequence shares."""
    rng = random.Random(6)
    cache = PrefixCache(10**6)
    seen: list[list[int]] = []
    for _ in range(cases(4000)):
        base = rng.choice(seen)[: rng.randint(0, 40)] if seen and rng.random() < 0.8 else []
        sequence = base + [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        longest = max((leading(sequence, other) for other in seen), default=0)
        assert cache.cached(packed(sequence)) == min(longest, len(sequence) - 1)
        cache.served(packed(sequence))
        seen.append(sequence)
    prefixes = {tuple(sequence[:end]) for sequence in seen for end in range(1, len(sequence) + 1)}
    assert cache.tokens == len(prefixes)


def test_the_ends_of_the_oldest_sequences_go_first() -> None:
    cache = PrefixCache(100)
    system = list(range(20))
    sessions = [system + [1000 * number + place for place in range(30)] for number in range(1, 4)]
    for sequence in sessions[:2]:
        cache.served(packed(sequence))
    assert cache.tokens == 80
    cache.served(packed(sessions[2]))
    assert cache.tokens == 100
    assert [cache.cached(packed([*sequence, 7])) for sequence in sessions] == [40, 50, 50]
    cache.served(packed(sessions[0]))
    assert [cache.cached(packed([*sequence, 7])) for sequence in sessions] == [50, 40, 50]


def test_many_sequences_through_a_small_cache() -> None:
    """Whatever is dropped, the bound holds and what is newest is there."""
    rng = random.Random(7)
    cache = PrefixCache(60)
    for _ in range(3000):
        sequence = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
        cache.served(packed(sequence))
        assert cache.tokens <= 60
        assert cache.cached(packed([*sequence, 9])) == len(sequence)
    cache.served(packed(list(range(100))))
    assert (cache.tokens, cache.cached(packed(list(range(100))))) == (60, 60)
    cache.clear()
    assert (cache.tokens, cache.cached(packed([1, 2]))) == (0, 0)


@asynccontextmanager
async def engine(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(Simulator(Config(reasoning=0.0, **options)))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


async def chat(client: httpx.AsyncClient, *texts: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]
    response = await client.post(CHAT, json={"messages": messages, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def stats(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/sim/stats")).json()
    return found


async def test_sessions_share_what_they_begin_with() -> None:
    async with engine() as client:
        rules = "These are the rules of the house. " * 20
        first = (await chat(client, rules + "One."))["usage"]
        second = (await chat(client, rules + "Two."))["usage"]
        hit = second["prompt_tokens_details"]["cached_tokens"]
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        assert 100 < hit < second["prompt_tokens"] - 1
        again = (await chat(client, rules + "Two."))["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1
        found = await stats(client)
        assert found["prompt_tokens"] == sum(one["prompt_tokens"] for one in (first, second, again))
        assert found["prefix_hit_tokens"] == hit + again["prompt_tokens"] - 1


async def test_prefill_takes_time_and_a_hit_spares_it() -> None:
    async with engine(prefill_s=0.002) as client:
        loop, text = asyncio.get_running_loop(), "A long question about nothing. " * 20
        began = loop.time()
        usage = (await chat(client, text))["usage"]
        missed = loop.time() - began
        assert missed >= 0.002 * usage["prompt_tokens"]
        began = loop.time()
        await chat(client, text)
        assert loop.time() - began < missed / 2


async def test_an_abort_before_the_first_token_has_none() -> None:
    async with engine(prefill_s=1.0) as client:
        asked = asyncio.create_task(chat(client, "Hello", sim={"latency_s": 1}, rid="r"))
        while (await stats(client))["in_flight"] != 1:
            await asyncio.sleep(0.005)
        await client.post("/abort_request", json={"rid": "r"})
        assert (await asked)["usage"]["completion_tokens"] == 0


async def test_health_hangs_while_paused_but_not_model_info() -> None:
    async with engine() as client:
        await client.post("/pause_generation", json={})
        health = asyncio.create_task(client.get("/health"))
        assert (await client.get("/model_info")).status_code == 200
        await asyncio.sleep(0.05)
        assert not health.done()
        await client.post("/continue_generation", json={})
        assert (await health).status_code == 200
        await client.post("/pause_generation", json={})
        await client.post("/sim/behaviour", json={"health_hangs_when_paused": False})
        assert (await client.get("/health")).status_code == 200
        await client.post("/sim/behaviour", json={"health": "error"})
        assert (await client.get("/health")).status_code == 500
        found = await stats(client)
        assert (found["probes"], found["requests"][-1]["path"]) == (
            {"/health": 3, "/model_info": 1},
            "/pause_generation",
        )


FAILING = {
    "/open_session": ("sessions", {"capacity_of_str_len": 1, "session_id": "s"}),
    "/close_session": ("sessions", {"session_id": "t"}),
    "/abort_request": ("abort", {"abort_all": True}),
    "/pause_generation": ("pause", {}),
    "/continue_generation": ("resume", {}),
}


@pytest.mark.parametrize("path", FAILING)
async def test_routes_fail_as_ordered_and_do_nothing(path: str) -> None:
    switch, body = FAILING[path]
    async with engine() as client:
        await client.post("/open_session", json={"capacity_of_str_len": 1, "session_id": "t"})
        if path == "/continue_generation":
            await client.post("/pause_generation", json={})
        before = await stats(client)
        for outcome, status in {"missing": 404, "refused": 400, "error": 500}.items():
            await client.post("/sim/behaviour", json={switch: outcome})
            assert (await client.post(path, json=body)).status_code == status
        after = await stats(client)
        for name in ("open_sessions", "closed_sessions", "paused"):
            assert after[name] == before[name]
        assert (await client.post("/sim/behaviour", json={"nonsense": 1})).status_code == 400
        await client.post("/sim/reset")
        assert (await client.post(path, json=body)).status_code == 200


async def test_slow_sessions_and_the_order_of_requests() -> None:
    async with engine() as client:
        await client.post("/sim/behaviour", json={"sessions_delay_s": 0.1})
        opening = client.post("/open_session", json={"capacity_of_str_len": 1, "session_id": "s"})
        slow = asyncio.create_task(opening)
        await asyncio.sleep(0.02)
        await chat(client, "Hello")
        await slow
        opened, asked = (await client.get("/sim/requests?last=9")).json()
        assert (opened["path"], opened["number"], asked["path"], asked["number"]) == ("/open_session", 1, CHAT, 2)
        assert opened["arrived"] < asked["arrived"] < asked["answered"] < opened["answered"]
