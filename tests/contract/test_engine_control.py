"""Orders to engines, against simulators of both dialects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import httpx
import pytest
from helpers.answering import Answer, Answering, Asked
from integration.stand import HOURS

from app.domain.fleet import PauseMode
from app.domain.patterns import address_pattern
from app.upstream.client import EngineClient
from app.upstream.control import AT_ONCE, EngineControl
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.anyio

Dialect = Literal["sglang", "vllm"]
DIALECTS: tuple[Dialect, ...] = ("sglang", "vllm")


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, SimulatorProcess]]:
    with SimulatorProcess() as sglang, SimulatorProcess("--dialect", "vllm") as vllm:
        yield {"sglang": sglang, "vllm": vllm}


@pytest.fixture
def urls(engines: dict[str, SimulatorProcess]) -> dict[str, str]:
    for engine in engines.values():
        httpx.post(engine.base_url + "/sim/reset")
    return {name: engine.base_url for name, engine in engines.items()}


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    made = EngineClient(connect_timeout_s=5, timeout_s=20, max_bytes=1 << 20)
    yield made
    await made.close()


def controlling(
    client: EngineClient, dialect: Any, api_key: str | None = None, engine: str = "", *workers: str
) -> EngineControl:
    """Of one engine, and of a router's workers that the operator names."""
    return EngineControl(client, dialect, api_key, engine.__eq__, [address_pattern(text) for text in workers])


def is_paused(url: str) -> bool:
    found: bool = httpx.get(url + "/sim/stats").json()["paused"]
    return found


def asked(url: str) -> list[tuple[str, Any]]:
    return [(one["path"], one["body"]) for one in httpx.get(url + "/sim/requests", params={"last": 100}).json()]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("knows", ["operator", "probe", "nobody"])
async def test_an_engine_pauses_and_goes_on(
    urls: dict[str, str], client: EngineClient, dialect: Dialect, knows: str
) -> None:
    url = urls[dialect]
    control = controlling(client, dialect if knows == "operator" else "auto")
    known = dialect if knows == "probe" else None
    for _ in range(2):
        assert await control.pause(url, "abort", known) is None
        assert is_paused(url)
    for _ in range(2):
        assert await control.resume(url, known) is None
        assert not is_paused(url)


@pytest.mark.long
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("mode", "finish"), [("abort", "abort"), ("in_place", "stop"), ("retract", "stop")])
async def test_what_runs_ends_or_goes_on_as_the_mode_says(
    urls: dict[str, str], client: EngineClient, dialect: Dialect, mode: PauseMode, finish: str
) -> None:
    url, control = urls[dialect], controlling(client, "auto")
    seconds = HOURS if mode == "abort" else 1.0
    body = {"messages": [{"role": "user", "content": "Hello"}], "sim": {"latency_s": seconds, "tool_calls": False}}
    async with httpx.AsyncClient(timeout=30) as http:
        turn = asyncio.create_task(http.post(url + "/v1/chat/completions", json=body))
        while httpx.get(url + "/sim/stats").json()["started"] == 0:
            await asyncio.sleep(0.01)
        assert await control.pause(url, mode) is None
        assert is_paused(url)
        assert await control.resume(url) is None
        assert (await turn).json()["choices"][0]["finish_reason"] == finish


async def test_generations_are_ended_by_their_own_ids(urls: dict[str, str], client: EngineClient) -> None:
    control = controlling(client, "auto")
    rids = [f"turnlog-{number:032x}" for number in range(40)]
    assert await control.abort(urls["sglang"], rids) == dict.fromkeys(rids)
    assert sorted(body["rid"] for path, body in asked(urls["sglang"]) if path == "/abort_request") == rids


VLLM_ROUTES = [
    ({"dev_mode": True}, "/abort_requests"),
    ({"dev_mode": False, "scale_out": True}, "/inference/v1/abort_requests"),
    ({"dev_mode": False}, None),
]


@pytest.mark.long
@pytest.mark.parametrize(("deployed", "route"), VLLM_ROUTES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_vllm_ends_a_generation_by_the_id_that_its_header_gave(
    urls: dict[str, str], client: EngineClient, path: str, deployed: dict[str, bool], route: str | None
) -> None:
    url, control = urls["vllm"], controlling(client, "auto")
    httpx.post(url + "/sim/behaviour", json=deployed)
    rids = ["turnlog-1", "turnlog-2"]
    prompt = {"messages": [{"role": "user", "content": "Hello"}]} if "chat" in path else {"prompt": "Hello"}
    body = {**prompt, "max_tokens": 9, "sim": {"latency_s": 30.0 if route else 0.5, "tool_calls": False}}
    async with httpx.AsyncClient(timeout=40) as http:
        turns = [asyncio.create_task(http.post(url + path, json=body, headers={"X-Request-Id": rid})) for rid in rids]
        while httpx.get(url + "/sim/stats").json()["started"] < 2:
            await asyncio.sleep(0.01)
        found = await control.abort(url, rids)
        assert await control.abort(url, []) == {}
        finishes = {(await turn).json()["choices"][0]["finish_reason"] for turn in turns}
    if route is None:
        assert all("aborts no single generation" in str(error) for error in found.values())
        assert "abort" not in finishes
        return
    assert found == dict.fromkeys(rids)
    assert finishes == {"abort"}
    assert [asked_path for asked_path, _ in asked(url)][-1] == route


@pytest.mark.parametrize("outcome", ["missing", "refused", "error"])
async def test_what_an_engine_refuses_is_told(urls: dict[str, str], client: EngineClient, outcome: str) -> None:
    behaviour = dict.fromkeys(("pause", "resume", "abort"), outcome)
    for url in urls.values():
        httpx.post(url + "/sim/behaviour", json=behaviour)
    for dialect in ("auto", *DIALECTS):
        control = controlling(client, dialect)
        for url in urls.values():
            assert await control.pause(url, "abort") is not None
            assert await control.resume(url) is not None
            assert not is_paused(url)
            assert (await control.abort(url, ["turnlog-1"]))["turnlog-1"] is not None


@pytest.mark.parametrize("dialect", ["auto", "sglang"])
async def test_a_routers_workers_are_told(urls: dict[str, str], client: EngineClient, dialect: Any) -> None:
    """A router has no route to abort a generation; which worker has it, only the router knows."""
    workers = [urls["sglang"] + "/"] if dialect == "sglang" else list(urls.values())
    listed: list[Any] = [*workers]

    def answer(asked: Asked) -> Answer:
        if asked.path != "/workers":
            return Answer(status=404)
        return Answer(json.dumps({"workers": [{"url": url, "healthy": True} for url in listed], "total": 2}).encode())

    with Answering(answer) as router:
        control = controlling(client, dialect)
        assert await control.abort(router.base_url, ["turnlog-1", "turnlog-2"]) == {
            "turnlog-1": None,
            "turnlog-2": None,
        }
        for worker in workers:
            assert [path for path, _ in asked(worker.rstrip("/"))], "it was told nothing"
        listed.append(gone := "http://127.0.0.1:9")
        found = await control.abort(router.base_url, ["turnlog-1"])
        assert str(found["turnlog-1"]).startswith(f"worker {gone}: /abort_request")
        listed.clear()
        assert (await control.abort(router.base_url, ["turnlog-1"]))["turnlog-1"] is not None


ODD_WORKERS: tuple[Any, ...] = (
    *("http://127.0.0.1:1?x", "http://127.0.0.1:1?", "http://127.0.0.1:1#", "http://user:word@127.0.0.1:1"),
    *("http://@127.0.0.1:1", "127.0.0.1:1", "grpc://127.0.0.1:1", "http://127.0.0.1:1/a b", "http://127.0.0.1:x"),
    *("http://", "", "http://a\nb", f"http://{'a' * 70}", "http://[::1", None, 7, ["http://127.0.0.1:1"], {}),
)


async def test_an_odd_worker_is_told_of_and_the_others_are_asked(urls: dict[str, str], client: EngineClient) -> None:
    listed = [*({"url": url} for url in ODD_WORKERS), {}, "http://127.0.0.1:1", None]

    def answer(asked: Asked) -> Answer:
        workers = [listed[number], {"url": urls["sglang"]}]
        return Answer(json.dumps({"workers": workers}).encode()) if asked.path == "/workers" else Answer(status=404)

    with Answering(answer) as router:
        for number in range(len(listed)):
            found = await controlling(client, "sglang").abort(router.base_url, ["turnlog-1"])
            assert str(found["turnlog-1"]).startswith("worker 1: "), listed[number]
            assert asked(urls["sglang"])[number][0] == "/abort_request"


async def test_a_router_names_more_workers_than_are_told(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.upstream.control.MOST_WORKERS", 2)
    told: list[str] = []

    def answer(asked: Asked) -> Answer:
        if asked.path == "/workers":
            return Answer(json.dumps({"workers": [{"url": f"{url}/w{number}"} for number in range(3)]}).encode())
        told.append(asked.path)
        return Answer(status=404 if asked.path == "/abort_request" else 200)

    with Answering(answer) as router:
        url = router.base_url
        found = await controlling(client, "sglang").abort(url, ["turnlog-1"])
    assert "more than 2" in str(found["turnlog-1"]) or "no /abort_request" in str(found["turnlog-1"])
    assert sorted(told) == ["/abort_request", "/w0/abort_request", "/w1/abort_request"]


@pytest.mark.threat("a router's list sends the engines' key elsewhere")
@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
@pytest.mark.parametrize("known", ["nobody", "an engine", "a pattern"])
async def test_the_engines_key_goes_to_workers_that_the_operator_names(
    client: EngineClient, dialect: str, known: str
) -> None:
    keys: dict[str, str | None] = {}

    def router(asked: Asked) -> Answer:
        keys[f"router {asked.path}"] = asked.header("authorization")
        workers = [{"url": worker.base_url + "/v1/"}]
        return Answer(json.dumps({"workers": workers}).encode()) if asked.path == "/workers" else Answer(status=404)

    def work(asked: Asked) -> Answer:
        keys["worker"] = asked.header("authorization")
        return Answer()

    with Answering(router) as front, Answering(work) as worker:
        engine = worker.base_url if known == "an engine" else ""
        named = [f"127.0.0.0/8:{worker.server_port}"] if known == "a pattern" else ["127.0.0.2", "127.0.0.1:1"]
        found = await controlling(client, dialect, "key", engine, *named).abort(front.base_url, ["turnlog-1"])
    assert found == {"turnlog-1": None}
    assert keys.pop("worker") == (None if known == "nobody" else "Bearer key")
    assert set(keys.values()) == {"Bearer key"}


async def test_an_engine_that_is_not_there_is_told(client: EngineClient) -> None:
    control = controlling(client, "auto")
    url = "http://127.0.0.1:9"
    assert "ConnectionRefusedError" in str(await control.pause(url, "abort"))
    assert "ConnectionRefusedError" in str(await control.resume(url))
    assert "ConnectionRefusedError" in str(await control.abort(url, ["turnlog-1"]))


async def test_an_engine_that_is_silent_is_not_waited_for_with_each_order(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.upstream.control.ABORT_S", 0.3)
    asked = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        rids = [f"turnlog-{number}" for number in range(3 * AT_ONCE)]
        found = await controlling(client, "auto").abort(url, rids)
    assert list(found) == rids
    assert all("no answer" in str(error) for error in found.values())
    assert asked == AT_ONCE
