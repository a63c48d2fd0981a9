"""One process's way to the shared store: transactions that take time, fail, or are done although nobody is told."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.sql import Executable

from app.errors import StoreFull, StoreUnavailable
from app.store.dialect import Parameters, Row, Tx, WriteConflict
from app.store.unreadable import Unreadable
from tests.tools.simulation.loop import SimulatedLoop
from tests.tools.simulation.store import MemoryStore
from tests.tools.simulation.weather import Weather

T = TypeVar("T")

LANES = 3


class Server:
    """The database server, or the disk, that all processes of a schedule share."""

    def __init__(self, loop: SimulatedLoop, rng: random.Random, store: MemoryStore, weather: Weather) -> None:
        self.loop = loop
        self.rng = rng
        self.store = store
        self.weather = weather
        self.down_until = 0.0
        self.crashes = 0

    def crash(self, down_s: float) -> int:
        """Everything under way fails, what was not on disk may be lost; returns how many transactions were."""
        unsynced = self.store.unsynced
        lost = self.rng.choice((unsynced, unsynced, self.rng.randint(0, unsynced)))
        self.store.crash(lost)
        self.crashes += 1
        self.down_until = self.loop.time() + down_s
        return lost

    @property
    def is_down(self) -> bool:
        return self.loop.time() < self.down_until

    def happens(self, probability: float) -> bool:
        return self.weather.is_bad and self.rng.random() < probability

    def delay(self) -> float:
        """Seconds on the way to the server, or back."""
        stall = self.rng.random() * self.weather.stall_s if self.happens(self.weather.stalls) else 0.0
        return self.rng.expovariate(1 / self.weather.transaction_s) + stall


class SimulatedDatabase:
    """`ports.Database` of one process. `alone`: it has the store to itself, as with SQLite."""

    def __init__(self, server: Server, *, alone: bool) -> None:
        self.is_sqlite = alone
        self.lanes = 1 if alone else LANES
        self.unreadable = Unreadable()
        self._server = server
        self._under_way = 0

    async def read(
        self,
        function: Callable[[Connection], T],
        *,
        one_moment: bool = False,
        session_id: str | None = None,
        or_else: Callable[[Connection], T] | None = None,
    ) -> T:
        return await self._ask(lambda: self._server.store.read(function))

    async def read_autocommit(self, statement: Executable, parameters: Parameters) -> Sequence[Row]:
        return await self.read(lambda connection: connection.execute(statement, parameters).all())

    async def write(
        self,
        function: Callable[[Tx], T],
        *,
        durable: bool,
        runs_inline: bool = False,
        size: int = 0,
        until: float | None = None,
    ) -> T:
        """A brief one is done at once where the process has the store to itself and nothing else is under way."""
        server, weather = self._server, self._server.weather

        def transact() -> T:
            if server.happens(weather.full):
                raise StoreFull("the database is full")
            if not self.is_sqlite and server.happens(weather.conflicts):
                raise WriteConflict("another process's transaction came first")
            return server.store.transact(function, durable=durable)

        if self.is_sqlite and runs_inline and not durable and not self._under_way:
            self._require_up()
            return transact()
        self._under_way += 1
        try:
            return await self._ask(transact, may_lose_answer=True)
        finally:
            self._under_way -= 1

    async def empty_log_file(self) -> None:
        await self._ask(lambda: None)

    async def give_back(self) -> None:
        await self._ask(lambda: None)

    def _require_up(self) -> None:
        if self._server.is_down or self._server.happens(self._server.weather.refused):
            raise StoreUnavailable("the database cannot be reached")

    async def _ask(self, work: Callable[[], T], *, may_lose_answer: bool = False) -> T:
        """A server does the work whatever becomes of the process meanwhile; without one it dies with its process."""
        server, loop = self._server, self._server.loop
        where = None if self.is_sqlite else loop.world.context()
        answer: Any = loop.create_future()
        crashes = server.crashes

        def settle(result: T | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if server.crashes != crashes or (may_lose_answer and server.happens(server.weather.answer_lost)):
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
                self._require_up()
                result = work()
            except BaseException as error:  # noqa: BLE001 - handed over to whoever waits for it
                fault = error
            loop.call_later(server.delay(), settle, result, fault, context=where)

        loop.call_later(server.delay(), serve, context=where)
        found: T = await answer
        return found
