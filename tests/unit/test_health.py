"""Dead, busy or paused: what a look at an engine makes of its answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from app.domain.fleet import EngineListed
from app.fleet import health
from app.fleet.engines import Engines
from app.fleet.health import HealthWatch, Outcome
from app.fleet.member import Member
from app.upstream.client import EngineClient

pytestmark = pytest.mark.anyio

HANGS = None
INFO = b'{"model_path":"m","is_generation":true,"weight_version":"7"}'
PAUSED = b'{"is_paused":true}'
RUNNING = b'{"is_paused":false}'
NOT_UTF8 = b'{"weight_version":"\xff"}'
DEEP = b'{"deep":' + b"[" * 100_000

Route = tuple[int, bytes] | None


@pytest.fixture(autouse=True)
def timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was before a test is so again."""
    monkeypatch.setattr(health, "TIMEOUT_S", 60.0)


class Scripted:
    """Answers each route as told, 404 by default; HANGS answers never."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self.routes = dict(routes)
        self.asked: list[str] = []
        self.url = ""
        self._port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self._server = None
        for writer in self._connections:
            writer.close()
        await asyncio.sleep(0)

    def hangs(self, url: str) -> bool:
        return self._server is not None and self.routes.get(url.removeprefix(self.url), (404, b"{}")) is HANGS

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
                self.asked.append(path)
                route = self.routes.get(path, (404, b"{}"))
                if route is HANGS:
                    await reader.read()
                    break
                head = f"HTTP/1.1 {route[0]} Said\r\ncontent-length: {len(route[1])}\r\n\r\n"
                writer.write(head.encode() + route[1])
                await writer.drain()
        self._connections.discard(writer)
        writer.close()


class Impatient(HealthWatch):
    """Waits for an answer as long as it takes, and for one that does not come for a moment."""

    def __init__(self, engine: Scripted, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._engine = engine

    async def _ask(self, url: str) -> Outcome:
        health.TIMEOUT_S = 0.05 if self._engine.hangs(url) else 60.0
        return await super()._ask(url)


class Watched:
    """One engine, and a watch that looks when it is told."""

    def __init__(self, engine: Scripted, **options: Any) -> None:
        self.engine = engine
        self.gate_is_shut = False
        self._client = EngineClient(connect_timeout_s=5, timeout_s=20, max_bytes=1 << 20)
        self.engines = Engines(self._client)
        self.engines.serve([EngineListed(engine.url)])
        settings: dict[str, Any] = {"dialect": "auto", "api_key": None, **options}
        self.watch = Impatient(engine, self.engines, self._client, is_paused=lambda run: self.gate_is_shut, **settings)

    @property
    def member(self) -> Member:
        return self.engines.members[self.engine.url]

    async def look(self, times: int = 1) -> str:
        for _ in range(times):
            await self.watch.check(self.engine.url)
            self.member.failed_at = 0.0  # as if time had passed
        return self.member.health

    async def close(self) -> None:
        await self.watch.stop()
        await self._client.close()


@contextlib.asynccontextmanager
async def watched(routes: Mapping[str, Route], **options: Any) -> AsyncIterator[Watched]:
    engine = Scripted(routes)
    await engine.start()
    made = Watched(engine, **options)
    try:
        yield made
    finally:
        await made.close()
        await engine.stop()


@pytest.mark.parametrize(
    ("routes", "expected", "dialect"),
    [
        pytest.param({"/model_info": (200, INFO), "/health": (200, b"")}, "healthy", "sglang", id="sglang"),
        pytest.param({"/model_info": (200, INFO), "/health": HANGS}, "busy", "sglang", id="busy"),
        pytest.param({"/health": (200, b"")}, "healthy", None, id="vllm-or-router"),
        pytest.param({"/health": (200, b""), "/is_paused": (200, RUNNING)}, "healthy", "vllm", id="vllm-dev"),
        pytest.param({"/health": (200, b""), "/is_paused": (200, PAUSED)}, "paused", "vllm", id="vllm-paused"),
        pytest.param({"/health": (401, b"")}, "healthy", None, id="answers-at-all"),
        pytest.param({"/health": HANGS}, "busy", None, id="unknown-but-answers"),
        pytest.param({"/model_info": (200, b"[1"), "/health": (200, b"")}, "healthy", None, id="odd-info"),
        pytest.param({"/model_info": (200, NOT_UTF8), "/health": (200, b"")}, "healthy", None, id="not-utf-8"),
        pytest.param({"/model_info": (200, DEEP), "/health": (200, b"")}, "healthy", None, id="deep"),
        pytest.param(
            {
                "/is_paused": (200, RUNNING),
                "/weight_info": (200, NOT_UTF8),
                "/server_info?config_format=json": (200, NOT_UTF8),
                "/health": (200, b""),
            },
            "healthy",
            "vllm",
            id="vllm-not-utf-8",
        ),
    ],
)
async def test_an_engine_that_answers_is_never_dead(
    routes: Mapping[str, Route], expected: str, dialect: str | None
) -> None:
    async with watched(routes) as found:
        assert await found.look(3) == expected
        assert found.member.dialect == dialect
        assert found.member.weight_version == ("7" if dialect == "sglang" else None)


@pytest.mark.parametrize(
    "routes",
    [
        pytest.param({"/model_info": (200, INFO), "/health": (503, b"")}, id="sglang-starts"),
        pytest.param({"/health": (503, b"")}, id="vllm-engine-died"),
        pytest.param({"/model_info": HANGS, "/health": HANGS}, id="answers-nothing"),
    ],
)
async def test_an_engine_without_a_sign_of_life_is_dead_after_three_looks(routes: Mapping[str, Route]) -> None:
    async with watched(routes) as found:
        assert await found.look(2) == "unknown"
        assert await found.look() == "dead"
        assert found.member.last_error is not None


async def test_a_refused_connection_is_a_failure_and_an_answer_behind_it_a_restart() -> None:
    async with watched({"/model_info": (200, INFO), "/health": (200, b"")}) as found:
        await found.look()
        found.member.sessions = False
        await found.engine.stop()
        assert await found.look(2) == "healthy"
        assert await found.look() == "dead"
        await found.engine.start()
        assert await found.look() == "dead"
        assert await found.look() == "healthy"
        assert (found.member.generation, found.member.sessions) == (1, None)


@pytest.mark.parametrize("health_", [HANGS, (503, b"")], ids=["nothing", "says-it-is-not-well"])
@pytest.mark.parametrize("info", [HANGS, (200, INFO)], ids=["nothing", "cheap"])
async def test_behind_a_shut_gate_an_engine_is_paused(info: Route, health_: Route) -> None:
    """A refused connection is still a death, and silence brings no dead engine back."""
    async with watched({"/model_info": info, "/health": health_}) as found:
        found.gate_is_shut = True
        assert await found.look(3) == "paused"
        assert "/health" not in found.engine.asked
        await found.engine.stop()
        assert await found.look(3) == "dead"
        await found.engine.start()
        found.engine.routes["/model_info"] = HANGS
        assert await found.look(2) == "dead"
        found.engine.routes["/model_info"] = (200, INFO)
        assert await found.look(2) == "paused"


async def test_a_known_vllm_is_not_asked_for_what_it_does_not_have() -> None:
    async with watched({"/health": (200, b"")}, dialect="vllm") as found:
        await found.look(2)
        assert sorted(found.engine.asked) == ["/health", "/health", "/is_paused", "/is_paused"]


async def test_ready_asks_the_engines_of_which_nothing_is_known() -> None:
    async with watched({"/health": (200, b"")}) as found:
        assert await found.watch.any_alive()
        asked = len(found.engine.asked)
        assert await found.watch.any_alive()
        assert len(found.engine.asked) == asked
        found.member.health = "dead"
        assert not await found.watch.any_alive()
        found.engines.serve([])
        assert not await found.watch.any_alive()


async def test_every_engine_is_looked_at_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CHECK_INTERVAL_S", 0.06)
    async with watched({"/model_info": (200, INFO), "/health": (200, b"")}) as found:
        started: list[str] = []
        look_at = found.watch.check

        def noted(url: str) -> asyncio.Task[None]:
            started.append(url)
            return look_at(url)

        monkeypatch.setattr(found.watch, "check", noted)
        found.engines.serve([EngineListed(f"{found.engine.url}/{number}") for number in range(6)])
        found.watch.start()
        async with asyncio.timeout(20):
            while len({*started}) < 6:
                await asyncio.sleep(0.001)
        last = max(map(started.index, started))
        assert max(Counter(started[:last]).values()) <= 2, "a round that comes late looks at all that are due"


async def test_a_turn_that_is_refused_has_the_engine_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CHECK_INTERVAL_S", 60.0)
    monkeypatch.setattr(health, "RECHECK_S", 0.6)
    async with watched({"/model_info": (200, INFO), "/health": (200, b"")}) as found:
        found.watch.start()
        while found.member.health == "unknown":
            await asyncio.sleep(0.01)
        await found.engine.stop()
        with contextlib.suppress(Exception):
            await found.engines.generate(found.engines.order(None, "s"), "chat", _no_body, [], lambda size: None)
        assert found.member.failures == 1
        async with asyncio.timeout(20):
            while found.member.health != "dead":
                await asyncio.sleep(0.01)
        await found.engine.start()
        async with asyncio.timeout(20):
            while found.member.health != "healthy":
                await asyncio.sleep(0.01)


async def _no_body(engine: str) -> bytes:
    return b"{}"
