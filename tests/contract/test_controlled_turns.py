"""What becomes of a name where its turn is cut off, at whatever point, on both databases and with a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
from helpers.store import LEASE_S, Store

from app.domain.control import Action, SessionControl
from app.domain.fleet import EngineListed
from app.features.session_control.affinities import Use
from app.features.session_control.controls import ControlledTurn, SessionControls
from app.fleet.engines import EngineOrder, Engines
from app.sessions.cache import SessionCache
from app.settings import ALL, Settings
from app.turn.in_flight import EngineChoice
from app.upstream.client import EngineClient
from app.upstream.sessions import EngineSessions
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.anyio

PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def running() -> Iterator[SimulatorProcess]:
    with SimulatorProcess() as engine:
        yield engine


@pytest.fixture
def engine(running: SimulatorProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.base_url) as client:
        client.post("/sim/reset")
        yield client


@pytest.fixture
async def controls(store: Store, running: SimulatorProcess) -> AsyncIterator[SessionControls]:
    settings = Settings(upstreams=(running.base_url,), engine_sessions=ALL)
    client = EngineClient(connect_timeout_s=5, timeout_s=60, max_bytes=1 << 20)
    engines = Engines(client)
    engines.serve([EngineListed(running.base_url)])
    cache = SessionCache(store.database, store.writer, 1 << 20)
    made = SessionControls(
        database=store.database,
        writer=store.writer,
        cache=cache,
        engines=engines,
        calls=EngineSessions(client, None),
        settings=settings,
        incarnation=lambda: store.me,
        lease_s=lambda: LEASE_S,
    )
    made.start()
    yield made
    await made.stop()
    await cache.close()
    await client.close()


def turn(controls: SessionControls, action: Action | None) -> ControlledTurn:
    return controls.turn(SessionControl("c", action), "s")


async def sent(of: ControlledTurn, url: str) -> None:
    """All but the generation."""
    choice = EngineChoice(EngineOrder(url, list))
    await of.place(choice)
    if choice.control is not None:
        await choice.control.prepare(url)


async def opened(controls: SessionControls, url: str) -> None:
    first = turn(controls, "open")
    await sent(first, url)
    first.finish(())


async def told(engine: httpx.Client) -> list[str]:
    """The session calls that the engine has seen."""
    seen = await asyncio.to_thread(lambda: engine.get("/sim/requests", params={"last": 99}).json())
    return [one["path"] for one in seen]


async def eventually(condition: Callable[[list[str]], bool], engine: httpx.Client) -> list[str]:
    async with asyncio.timeout(PATIENCE_S):
        while not condition(found := await told(engine)):
            await asyncio.sleep(0.02)
    return found


async def test_a_close_stands_though_its_turn_was_never_sent(
    controls: SessionControls, running: SimulatorProcess, engine: httpx.Client
) -> None:
    await opened(controls, running.base_url)
    turn(controls, "close").finish(())
    await controls.stop()
    assert await told(engine) == ["/open_session", "/close_session"]


async def test_a_turn_that_is_cut_off_while_the_engine_opens_leaves_nothing_there(
    controls: SessionControls, running: SimulatorProcess, engine: httpx.Client
) -> None:
    engine.post("/sim/behaviour", json={"sessions_delay_s": 0.5})
    cut = turn(controls, "open")
    work = asyncio.create_task(sent(cut, running.base_url))
    await eventually(lambda paths: paths == ["/open_session"], engine)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    cut.finish(())
    await eventually(lambda paths: paths == ["/open_session", "/close_session"], engine)
    engine.post("/sim/behaviour", json={"sessions_delay_s": 0.0})
    again = turn(controls, "open")
    await sent(again, running.base_url)
    again.finish(())
    assert (await told(engine))[2:] == ["/open_session"]


async def test_what_a_turn_wrote_before_it_was_cut_off_is_ended_though_the_turn_does_not_know(
    controls: SessionControls, running: SimulatorProcess, engine: httpx.Client, store: Store
) -> None:
    """The store has taken the operation, whose outcome nobody waits for any more."""
    cut = turn(controls, "open")
    wish = Use(cut.control, "s", store.me, LEASE_S, running.base_url, controls.session_engines())
    assert (await store.submit(wish)).state == "opening"
    cut.finish(())
    await eventually(lambda paths: paths == ["/close_session"], engine)
    await opened(controls, running.base_url)


async def test_who_waits_for_what_a_turn_left_that_was_cut_off_goes_on(
    controls: SessionControls, running: SimulatorProcess, engine: httpx.Client, store: Store
) -> None:
    controls.lease_s = lambda: 3600.0
    cut = turn(controls, "open")
    wish = Use(cut.control, "s", store.me, 3600.0, running.base_url, controls.session_engines())
    assert (await store.submit(wish)).state == "opening"
    cut.finish(())
    waiting = controls.turn(SessionControl("c", "open"), "other")
    async with asyncio.timeout(PATIENCE_S):
        await sent(waiting, running.base_url)
    waiting.finish(())
    assert await told(engine) == ["/close_session", "/open_session"]


async def test_who_waits_for_a_name_goes_on_when_it_is_free(
    controls: SessionControls, running: SimulatorProcess, engine: httpx.Client
) -> None:
    await opened(controls, running.base_url)
    engine.post("/sim/behaviour", json={"sessions_delay_s": 0.3})
    closing = turn(controls, "close")
    await sent(closing, running.base_url)
    closing.finish(())
    await opened(controls, running.base_url)
    assert await told(engine) == ["/open_session", "/close_session", "/open_session"]
