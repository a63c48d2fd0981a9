"""The store that all processes of a simulation share: the real statements on SQLite in memory, and what a crash loses.

A transaction happens at one moment, so what two of them do to each other inside is seen by `postgres` alone; that they
wait, fail, are done although the answer was lost, and vanish in a crash, is.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from sqlalchemy import Connection, create_engine, insert, select
from sqlalchemy.pool import StaticPool
from sqlalchemy.sql import Executable

from app.composition import metadata, store_points
from app.domain.events import Recorded, UnknownEvent
from app.domain.session import Session, fold
from app.store.damage import Unreadable
from app.store.dialect import Parameters, Row, Tx
from app.store.ports import Bucket
from app.store.schema import open_turns, store_meta
from app.store.sessions import load_events
from app.store.sqlite_tx import SqliteTx
from workers.codec import CorruptContent

T = TypeVar("T")

JULIAN_EPOCH = 2440587.5
DAY_S = 86400.0


class MemoryTx(SqliteTx):
    """Positions begin anew in each schedule."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection, 1, store_points())

    def restart(self) -> None:
        self.positions = itertools.count(1)


class Store(ABC):
    """What all processes of a simulation share, used by one schedule after the other. `objects` lie in object storage;
    `unsynced` is how many transactions a crash could lose. `commits` are the ids of transactions in the order in which
    they were committed, where that is not the log's order."""

    unsynced = 0

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.commits: list[int] = []

    @abstractmethod
    def restart(self, now: Callable[[], float]) -> None:
        """Empty again; `now` gives seconds since the epoch."""

    @abstractmethod
    def read(self, function: Callable[[Connection], T]) -> T:
        """What is committed, at once and without a fault."""

    @abstractmethod
    def close(self) -> None: ...

    def log(self, session_id: str, limit: int | None = None) -> Sequence[Recorded]:
        """The session's events, or the first `limit`. Raises UnknownEvent."""
        return self.read(lambda connection: load_events(connection, session_id, limit=limit))

    def state(self, session_id: str, limit: int | None = None) -> Session:
        """The session by its log, which must be there."""
        found = fold(session_id, self.log(session_id, limit))
        assert found is not None, session_id
        return found

    def has_claim(self, session_id: str) -> bool:
        query = select(open_turns.c.fence).where(open_turns.c.session_id == session_id)
        return self.read(lambda connection: connection.execute(query).first()) is not None


class MemoryStore(Store):
    """One database, used again by one schedule after the other: statements stay compiled."""

    def __init__(self) -> None:
        super().__init__()
        self._now: Callable[[], float] = lambda: 0.0
        self._raw = sqlite3.connect(":memory:", isolation_level=None)
        # The database's clock is the simulation's.
        self._raw.create_function("julianday", 1, lambda _: JULIAN_EPOCH + self._now() / DAY_S)
        self._engine = create_engine("sqlite://", creator=lambda: self._raw, poolclass=StaticPool)
        metadata().create_all(self._engine)
        self._core = self._engine.connect()
        self._core.execute(insert(store_meta).values(key="epoch", value="1"))
        self._empty = self._raw.serialize()
        self._tx = MemoryTx(self._raw)

    def restart(self, now: Callable[[], float]) -> None:
        self.objects.clear()
        self._now = now
        if self._raw.in_transaction:
            self._raw.execute("ROLLBACK")
        self._raw.deserialize(self._empty)
        self._tx.restart()
        self.unsynced = 0

    def close(self) -> None:
        self._core.close()
        self._engine.dispose()
        self._raw.close()

    def read(self, function: Callable[[Connection], T]) -> T:
        return function(self._core)

    def transact(self, function: Callable[[Tx], T], *, durable: bool) -> T:
        """What is not durable is lost in a crash, and with it nothing that came before it.

        SQLite commits what is durable alone, with all that came before; a savepoint lies before each of the others.
        """
        if not self._raw.in_transaction:
            self._raw.execute("BEGIN IMMEDIATE")
        before = f"before_{self.unsynced}"
        self._raw.execute(f"SAVEPOINT {before}")
        if not durable:
            self.unsynced += 1
        try:
            result = function(self._tx)
        except BaseException:
            self._raw.execute(f"ROLLBACK TO {before}")
            raise
        if durable:
            self._raw.execute("COMMIT")
            self.unsynced = 0
        return result

    def crash(self, lost: int) -> None:
        """The newest `lost` transactions never were."""
        if lost:
            self._raw.execute(f"ROLLBACK TO before_{self.unsynced - lost}")
        if self._raw.in_transaction:
            self._raw.execute("COMMIT")
        self.unsynced = 0


class Transactions(ABC):
    """The part of `ports.Database` that does not depend on where the store is."""

    is_sqlite = False
    lanes = 1
    bucket: Bucket | None = None

    def __init__(self) -> None:
        self.unreadable = Unreadable()
        self.points = store_points()

    @abstractmethod
    async def _read(self, function: Callable[[Connection], T]) -> T: ...

    @abstractmethod
    async def _write(self, function: Callable[[Tx], T], *, durable: bool, runs_inline: bool) -> T: ...

    async def read(
        self,
        function: Callable[[Connection], T],
        *,
        one_moment: bool = False,
        session_id: str | None = None,
    ) -> T:
        try:
            return await self._read(function)
        except (CorruptContent, UnknownEvent) as error:
            if session_id is None:
                raise
            raise self.unreadable.error(session_id, error) from error

    async def read_autocommit(self, statement: Executable, parameters: Parameters) -> Sequence[Row]:
        return await self._read(lambda connection: connection.execute(statement, parameters).all())

    async def write(
        self,
        function: Callable[[Tx], T],
        *,
        durable: bool,
        runs_inline: bool = False,
        size: int = 0,
        until: float | None = None,
    ) -> T:
        return await self._write(function, durable=durable, runs_inline=runs_inline)

    async def empty_log_file(self) -> None:
        return

    async def give_back(self) -> None:
        return


class _Objects(Bucket):
    """Object storage without delay or fault."""

    is_folder = False

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self._objects = objects

    async def read(self, name: str) -> bytes | None:
        return self._objects.get(name)

    async def url_of(self, name: str, seconds: int) -> str:
        raise NotImplementedError


class ReadDatabase(Transactions):
    """`ports.Database` for reads of a store without delay or fault, for any event loop."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._stored = store
        self.bucket = _Objects(store.objects) if store.objects else None

    async def _read(self, function: Callable[[Connection], T]) -> T:
        await asyncio.sleep(0)
        return self._stored.read(function)

    async def _write(self, function: Callable[[Tx], T], *, durable: bool, runs_inline: bool) -> T:
        raise NotImplementedError("this one only reads")


class MemoryDatabase(ReadDatabase):
    """`ports.Database` over a memory store without delay or fault."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self._store = store

    async def _write(self, function: Callable[[Tx], T], *, durable: bool, runs_inline: bool) -> T:
        await asyncio.sleep(0)
        return self._store.transact(function, durable=durable)
