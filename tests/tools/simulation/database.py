"""One process's way to the shared store: transactions that take time, fail, or are done although nobody is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection

from app.errors import StoreFull, StoreUnavailable
from app.store import ports
from app.store.dialect import Tx, WriteConflict
from tests.tools.simulation.store import MemoryStore, Transactions
from tests.tools.simulation.world import World

T = TypeVar("T")

LANES = 3

AROUND_EVERY = 9
"""Of reads that may go around damage."""


class ProcessDatabase(ports.Database, Protocol):
    """What one process has of the store."""

    def die(self) -> None:
        """Its process is killed."""


class Server(ABC):
    """The database server, or the disk, that all processes of a schedule share."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.down_until = 0.0

    @abstractmethod
    def database(self, name: str, *, alone: bool, bucket: ports.Bucket | None = None) -> ProcessDatabase:
        """For a new process. `alone`: no other uses the store."""

    @abstractmethod
    def crash(self, down_s: float) -> int:
        """Everything under way fails, what was not on disk may be lost; returns how many transactions were."""

    @abstractmethod
    def close(self) -> None:
        """The schedule is over."""


class MemoryServer(Server):
    """One whose transactions happen at one moment each."""

    def __init__(self, world: World, store: MemoryStore) -> None:
        super().__init__(world)
        self.store = store
        self.crashes = 0

    def database(self, name: str, *, alone: bool, bucket: ports.Bucket | None = None) -> SimulatedDatabase:
        return SimulatedDatabase(self, bucket, alone=alone)

    def crash(self, down_s: float) -> int:
        rng, store = self.world.rng, self.store
        lost = rng.choice((store.unsynced, store.unsynced, rng.randint(0, store.unsynced)))
        store.crash(lost)
        self.crashes += 1
        self.down_until = self.world.loop.time() + down_s
        return lost

    def close(self) -> None:
        return

    def require_up(self) -> None:
        if self.world.loop.time() < self.down_until or self.world.happens(self.world.weather.refused):
            raise StoreUnavailable("the database cannot be reached")

    def delay(self) -> float:
        """Seconds on the way to the server, or back."""
        rng, weather = self.world.rng, self.world.weather
        stall = rng.random() * weather.stall_s if self.world.happens(weather.stalls) else 0.0
        return rng.expovariate(1 / weather.transaction_s) + stall


class SimulatedDatabase(Transactions):
    """`ports.Database` of one process. `alone`: it has the store to itself, as with SQLite."""

    def __init__(self, server: MemoryServer, bucket: ports.Bucket | None, *, alone: bool) -> None:
        super().__init__()
        self.bucket = bucket
        self.is_sqlite = alone
        self.lanes = 1 if alone else LANES
        self._server = server
        self._under_way = 0
        self._reads = 0

    async def read(
        self,
        function: Callable[[Connection], T],
        *,
        one_moment: bool = False,
        session_id: str | None = None,
        on_damage: Callable[[Connection], T] | None = None,
    ) -> T:
        """Now and then as after a damaged page: what goes around one finds everything where there is none."""
        self._reads += on_damage is not None
        if on_damage is not None and self._reads % AROUND_EVERY == 0:
            function = on_damage
        return await self._read(function)

    async def _read(self, function: Callable[[Connection], T]) -> T:
        return await self._ask(lambda: self._server.store.read(function))

    async def _write(self, function: Callable[[Tx], T], *, durable: bool, runs_inline: bool) -> T:
        """A brief one is done at once where the process has the store to itself and nothing else is under way."""
        world, store = self._server.world, self._server.store

        def transact() -> T:
            if world.happens(world.weather.full):
                raise StoreFull("the database is full")
            if not self.is_sqlite and world.happens(world.weather.conflicts):
                raise WriteConflict("another process's transaction came first")
            return store.transact(function, durable=durable)

        if self.is_sqlite and runs_inline and not durable and not self._under_way:
            self._server.require_up()
            return transact()
        self._under_way += 1
        try:
            return await self._ask(transact, may_lose_answer=True)
        finally:
            self._under_way -= 1

    def die(self) -> None:
        return

    async def empty_log_file(self) -> None:
        await self._ask(lambda: None)

    async def give_back(self) -> None:
        await self._ask(lambda: None)

    async def _ask(self, work: Callable[[], T], *, may_lose_answer: bool = False) -> T:
        """A server does the work whatever becomes of the process meanwhile; without one it dies with its process."""
        server, world, loop = self._server, self._server.world, self._server.world.loop
        where = None if self.is_sqlite else loop.world.context()
        answer: Any = loop.create_future()
        crashes = server.crashes

        def settle(result: T | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if server.crashes != crashes or (may_lose_answer and world.happens(world.weather.answer_lost)):
                error = StoreUnavailable("the connection to the database was lost")
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

        def serve() -> None:
            result: T | None = None
            fault: BaseException | None = None
            try:
                if server.crashes != crashes:
                    raise StoreUnavailable("the connection to the database was lost")
                server.require_up()
                result = work()
            except BaseException as error:  # noqa: BLE001 - handed over to whoever waits for it
                fault = error
            loop.call_later(server.delay(), settle, result, fault, context=where)

        loop.call_later(server.delay(), serve, context=where)
        found: T = await answer
        return found
