"""The fleet's log on both databases: who appends, who reads, and what all processes then agree on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal, TypeVar, cast

import httpx
import pytest
from helpers.gates import Passing
from helpers.store import Store
from sqlalchemy import Connection, delete
from sqlalchemy.sql import Executable

from app.domain.fleet import (
    AdapterPaused,
    AdapterResumed,
    EngineListed,
)
from app.domain.session import rid_of
from app.errors import StoreUnavailable
from app.features.gates.gates import Gates
from app.features.gates.pauses import Pauses
from app.fleet.engines import Engines
from app.fleet.state import STALE_S, FleetState
from app.store.database import Database
from app.store.dialect import Parameters, Row
from app.store.schema import fleet_events
from app.store.writer import Writer
from app.upstream.client import EngineClient
from app.upstream.control import EngineControl
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.anyio

T = TypeVar("T")


@contextlib.asynccontextmanager
async def process(database: Database) -> AsyncIterator[FleetState]:
    """What one process has of the fleet."""
    writer = Writer(database)
    writer.start()
    state = FleetState(database, writer)
    await state.start()
    yield state
    await state.stop()
    await writer.stop()


@pytest.fixture
async def states(database: Database) -> AsyncIterator[Sequence[FleetState]]:
    """Of two processes; SQLite is for one, which has both roles."""
    async with process(database) as first:
        if database.is_sqlite:
            yield first, first
            return
        async with process(database) as second:
            yield first, second


async def test_a_lease_is_by_the_databases_clock_and_never_shortened(states: Sequence[FleetState]) -> None:
    first = states[0]
    placed = await first.append(lambda fleet: AdapterPaused("a", 1, 0.0), lease_s=600)
    assert placed is not None
    assert isinstance(placed.event, AdapterPaused)
    until = placed.event.until
    assert until == pytest.approx(placed.at + 600)
    shorter = await first.append(lambda fleet: AdapterPaused("a", 1, until), lease_s=1)
    assert shorter is not None
    assert isinstance(shorter.event, AdapterPaused)
    assert shorter.event.until == until


async def test_nothing_to_do_is_judged_by_what_is_so_now(postgres_store: Store) -> None:
    """A resume that comes by way of a process which has not heard of the pause yet opens the gate all the same."""
    database = postgres_store.database
    async with process(database) as first, process(database) as late:
        assert late._polling is not None
        late._polling.cancel()
        await first.append(lambda fleet: AdapterPaused("a", 1, 0.0), lease_s=600)
        assert not late.fleet.is_shut("default", "a")
        opened = await late.append(lambda fleet: AdapterResumed("a", 1) if fleet.is_shut("default", "a") else None)
        assert opened is not None
        assert not (await first.refresh()).is_shut("default", "a")


async def test_an_event_that_the_database_has_lost_is_forgotten(postgres_store: Store) -> None:
    """A failover to a standby that was behind: what comes then has the same number, and must not be missed."""
    database = postgres_store.database
    async with process(database) as first, process(database) as second:
        await first.append(lambda fleet: AdapterPaused("a", 1, 0.0), lease_s=600)
        await first.append(lambda fleet: AdapterResumed("a", 1))
        await second.refresh()
        lost = delete(fleet_events).where(fleet_events.c.seq == 2)
        await database.write(lambda tx: tx.run(lost, {}), durable=True)
        await first.refresh()
        assert (first.fleet.version, first.fleet.is_shut("default", "a")) == (1, True)
        await first.append(lambda fleet: AdapterPaused("b", 1, 0.0), lease_s=600)
        assert (await second.refresh()).is_shut("default", "a")
        assert second.fleet == first.fleet
        assert second.fleet.version == 2


class Far:
    """The database by a way that takes longer than STALE_S, and has faults that nobody has thought of."""

    is_sqlite = False

    def __init__(self, database: Database) -> None:
        self.faults: list[Exception] = []
        self._database = database

    async def read(self, function: Callable[[Connection], T], *, one_moment: bool = False) -> T:
        await asyncio.sleep(1.5 * STALE_S)
        return await self._database.read(function)

    async def read_autocommit(self, statement: Executable, parameters: Parameters) -> Sequence[Row]:
        await asyncio.sleep(1.5 * STALE_S)
        if self.faults:
            raise self.faults.pop()
        return await self._database.read_autocommit(statement, parameters)


async def test_a_slow_database_lets_turns_pass_and_is_still_asked(postgres_store: Store) -> None:
    async with process(postgres_store.database) as near:
        far = FleetState(cast(Database, Far(postgres_store.database)), postgres_store.writer)
        await far.start()
        gates = Gates(far)
        async with asyncio.timeout(20):
            await gates.wait(Passing("a"))
        await near.append(lambda fleet: AdapterPaused("a", 1, 0.0), lease_s=600)
        async with asyncio.timeout(20):
            while not far.fleet.is_shut("default", "a"):
                await asyncio.sleep(0.01)
        await far.stop()


@contextlib.asynccontextmanager
async def watching(states: Sequence[FleetState], database: Database) -> AsyncIterator[list[Pauses]]:
    """Each process's watch over the leases, without engines."""
    client = EngineClient(connect_timeout_s=1, timeout_s=1, max_bytes=1 << 20)
    made = [
        Pauses(
            fleet=state,
            gates=Gates(state),
            engines=Engines(client),
            control=EngineControl(client, "auto", None, lambda url: False),
            database=database,
        )
        for state in dict.fromkeys(states)
    ]
    for pauses in made:
        pauses.start()
    yield made
    for pauses in made:
        await pauses.stop()
    await client.close()


class Late(EngineControl):
    """Its orders to go on come to the engines late."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client, "sglang", None, lambda url: True)
        self.began, self.goes = asyncio.Event(), asyncio.Event()

    async def resume(self, url: str, known: Literal["sglang", "vllm"] | None = None) -> str | None:
        self.began.set()
        await self.goes.wait()
        return await super().resume(url, known)


async def test_a_lease_that_is_made_longer_while_it_runs_out_leaves_the_engines_paused(sqlite_store: Store) -> None:
    client = EngineClient(connect_timeout_s=5, timeout_s=20, max_bytes=1 << 20)
    late, engines, database = Late(client), Engines(client), sqlite_store.database
    with SimulatorProcess() as engine:
        engines.serve([EngineListed(engine.base_url)])
        async with process(database) as state, httpx.AsyncClient(base_url=engine.base_url) as simulated:
            pauses = Pauses(fleet=state, gates=Gates(state), engines=engines, control=late, database=database)
            pauses.start()
            async with asyncio.timeout(20):
                await pauses.pause_fleet(None, "in_place", 0.1)
                await late.began.wait()
                await pauses.pause_fleet(None, "in_place", 600)
                late.goes.set()
                orders: list[str] = []
                while len(orders) < 4:
                    seen = (await simulated.get("/sim/requests", params={"last": 9})).json()
                    orders = [one["path"] for one in seen]
            assert orders[-2:] == ["/continue_generation", "/pause_generation"]
            assert state.fleet.gates.fleet.is_shut
            await pauses.stop()
    await client.close()


async def test_a_process_goes_on_looking_after_a_fault(postgres_store: Store, caplog: pytest.LogCaptureFixture) -> None:
    async with process(postgres_store.database) as near:
        faulty = Far(postgres_store.database)
        far = FleetState(cast(Database, faulty), postgres_store.writer)
        await far.start()
        faulty.faults = [RuntimeError("not to be thought of"), StoreUnavailable("away")]
        async with asyncio.timeout(20):
            while faulty.faults:
                await asyncio.sleep(0.01)
            await near.append(lambda fleet: AdapterPaused("a", 1, 0.0), lease_s=600)
            while not far.fleet.is_shut("default", "a"):
                await asyncio.sleep(0.01)
        await far.stop()
    assert caplog.text.count("the fleet's log cannot be read") == 1


async def test_a_resume_of_what_is_not_paused_writes_nothing(states: Sequence[FleetState], database: Database) -> None:
    async with watching(states, database) as watches:
        for _ in range(2):
            await watches[0].resume_adapter(None, "a", "7")
    assert states[0].fleet.version == 1


async def test_what_another_process_begins_before_it_knows_is_aborted_too(
    postgres_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.features.gates.pauses.SECOND_SWEEP_S", 3.0)
    rid = rid_of("s", 2, postgres_store.me)
    await postgres_store.create("s")
    with SimulatorProcess() as engine:
        async with process(postgres_store.database) as state, watching([state], postgres_store.database) as watches:
            watches[0]._engines.serve([EngineListed(engine.base_url)])
            pausing = asyncio.create_task(watches[0].pause_adapter(None, "a", 600))
            async with asyncio.timeout(20):
                while not state.fleet.is_shut("default", "a"):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # the first look is over by now
            await postgres_store.claim("s", 1, adapter="a")
            swept = await pausing
        asked = httpx.get(engine.base_url + "/sim/requests", params={"last": 10}).json()
    assert swept.aborted == [rid]
    assert [told["aborted"] for told in swept.engines.values()] == [1]
    assert [one["body"]["rid"] for one in asked if one["path"] == "/abort_request"] == [rid]
