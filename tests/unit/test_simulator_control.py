"""The engine simulator: aborts, pauses, sessions, and the process around it."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable

import httpx
import pytest
from integration.stand import WEATHER, until
from simulating import CHAT, SGLANG_ASKS, ask, choice_of, engine, user

from ops.simulator.lru import Lru
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def in_flight(client: httpx.AsyncClient, count: int) -> None:
    while (await client.get("/sim/stats")).json()["in_flight"] != count:
        await asyncio.sleep(0.005)


async def test_abort_by_prefix_keeps_the_tokens_so_far() -> None:
    async with engine(latency_s=600.0) as client:
        long = {"sim": {"completion_tokens": 600_000}}
        asked = asyncio.create_task(ask(client, user(), rid="group-1:turn-2", **long))
        other = asyncio.create_task(ask(client, user("other"), rid="other", sim={"latency_s": 0.3}))
        await in_flight(client, 2)
        await asyncio.sleep(0.1)
        assert (await client.post("/abort_request", json={"rid": "group-1"})).content == b""
        choice = choice_of(await asked)
        assert choice["finish_reason"] == choice["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(choice["response_token_ids"]) < 600_000
        assert choice_of(await other)["finish_reason"] != "abort"
        stats = (await client.get("/sim/stats")).json()
        assert (stats["started"], stats["finished"], stats["aborted"], stats["in_flight"]) == (2, 2, 1, 0)


async def test_pause_holds_and_continue_releases() -> None:
    async with engine() as client:
        await client.post("/pause_generation", json={"mode": "retract"})
        held = asyncio.create_task(ask(client, user()))
        await in_flight(client, 1)
        await asyncio.sleep(0.05)
        assert not held.done()
        await client.post("/update_weight_version", json={"new_version": "9", "abort_all_requests": False})
        await client.post("/continue_generation", json={})
        meta = choice_of(await held)["meta_info"]
        assert (meta["weight_version"], meta["finish_reason"]["type"]) == ("9", "stop")
        assert (await client.get("/model_info")).json()["weight_version"] == "9"
        running = asyncio.create_task(ask(client, user("long"), sim={"latency_s": 5}))
        await in_flight(client, 1)
        await client.post("/pause_generation", json={"mode": "abort"})
        assert choice_of(await running)["finish_reason"] == "abort"


async def test_vllm_pause() -> None:
    async with engine("vllm") as client:
        assert (await client.post("/pause?mode=wait")).status_code == 200
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        held = asyncio.create_task(client.post(CHAT, json={"messages": user()}))
        await in_flight(client, 1)
        await client.post("/resume")
        assert (await held).status_code == 200
        assert (await client.post("/open_session", json={"capacity_of_str_len": 1})).status_code == 404


async def test_replies_can_be_planned() -> None:
    weather = {"name": "weather", "arguments": {"city": "Oslo"}}
    async with engine() as client:
        await client.post("/sim/replies", json={"when": "Oslo", "sim": {"text": "I look.", "calls": [weather]}})
        await client.post("/sim/replies", json={"when": "Rain", "sim": {"text": "It rains."}, "count": 2})
        assert not choice_of(await ask(client, user("Oslo?")))["message"].get("tool_calls")
        called = choice_of(await ask(client, user("Oslo?"), tools=[WEATHER]))
        [call] = called["message"]["tool_calls"]
        assert (called["finish_reason"], called["message"]["content"]) == ("tool_calls", "I look.")
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Oslo"})
        told = [*user("Oslo?"), called["message"], {"role": "tool", "tool_call_id": call["id"], "content": "Rain"}]
        contents = [choice_of(await ask(client, told))["message"]["content"] for _ in range(3)]
        assert [content == "It rains." for content in contents] == [True, True, False]
        await client.post("/sim/replies", json={"when": "", "sim": {"text": "Never"}})
        await client.post("/sim/reset")
        assert choice_of(await ask(client, user("hi")))["message"]["content"] != "Never"


async def test_sessions_and_records() -> None:
    async with engine() as client:
        opened = await client.post("/open_session", json={"capacity_of_str_len": 1000, "session_id": "s"})
        assert opened.json() == "s"
        again = await client.post("/open_session", json={"capacity_of_str_len": 1000, "session_id": "s"})
        assert again.status_code == 400
        assert (await client.get("/sim/stats")).json()["open_sessions"] == ["s"]
        closed = await client.post("/close_session", json={"session_id": "s"})
        assert (closed.status_code, closed.content) == (200, b"")
        body = b'{ "messages":[{"role":"user","content":"raw"}] }'
        await client.post(CHAT, content=body, headers={"x-smg-routing-key": "k", "authorization": "Bearer x"})
        seen = (await client.get("/sim/requests?last=1")).json()[0]
        assert base64.b64decode(seen["body_base64"]) == body
        assert seen["headers"]["x-smg-routing-key"] == "k"
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "simulator"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/nothing")).status_code == 404


def test_lru_is_bounded() -> None:
    cache: Lru[int, str] = Lru(10)
    for number in range(20):
        cache.put(number, "x", 3)
    assert [number for number in range(20) if cache.get(number)] == [17, 18, 19]
    cache.put(99, "heavy", 11)
    assert cache.get(99) is None
    assert cache.get(19) == "x"


@pytest.mark.long
def test_as_a_process() -> None:
    """Delivery faults, Nagle off, and the helper itself."""
    with SimulatorProcess("--seed", "5", "--weight-version", "41") as process:
        with httpx.Client(base_url=process.base_url, timeout=2.0) as client:
            body = {"messages": user(), **SGLANG_ASKS}
            assert choice_of(client.post(CHAT, json=body).json())["meta_info"]["weight_version"] == "41"
            with pytest.raises(httpx.RemoteProtocolError):
                client.post(CHAT, json={**body, "sim": {"fault": "reset"}})
            drip = {"fault": {"fault": "drip", "pieces": 5, "delay_s": 0.02}}
            assert timed(lambda: client.post(CHAT, json={**body, "sim": drip})) > 0.08
            with pytest.raises(httpx.ReadTimeout):
                client.post(CHAT, json={**body, "sim": {"fault": "never"}}, timeout=0.1)
            with pytest.raises(httpx.ReadTimeout):
                client.post(CHAT, json={**body, "sim": {"latency_s": 30}}, timeout=0.1)
            until(lambda: client.get("/sim/stats").json()["disconnected"] == 1)
            assert client.get("/sim/stats").json()["in_flight"] == 0
        port = int(process.base_url.rpartition(":")[2])
        process.kill()
    with SimulatorProcess(port=port) as again:
        assert again.base_url.endswith(f":{port}")


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
