"""PostgreSQL in a simulation: the real `database.Database` of each process, the real server, and what is between them.

Each statement is a step of the schedule: it travels to the server, is done or waits for a lock there, and its answer
travels back. Meanwhile other processes' statements are done. A process that dies has its transactions rolled back, but
a COMMIT that is on its way is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import asyncpg
from sqlalchemy import event

from app.composition import store_points
from app.store import ports
from app.store.database import ANSWER_S, Database
from app.store.postgres import _drop
from app.store.postgres_tx import BEGIN, IDLE_S, LOCK_S
from tests.tools.simulation.backends import Backend, Work
from tests.tools.simulation.database import Server
from tests.tools.simulation.postgres_store import TIMED, PostgresStore
from tests.tools.simulation.world import World

STATEMENTS = 4
"""About how many a transaction has: faults are drawn for each, and are as frequent as those of transactions."""

WRITES = BEGIN.partition(";")[0]
"""Begins a transaction that writes. What follows, the limits of its time, is kept on the simulation's clock."""

COMMIT = "COMMIT"

READS = "BEGIN"
"""Begins a transaction whose statements each see what is committed: by themselves they see the same."""

QUIET = (READS, "ROLLBACK")
"""How statements begin that are part of the step before or after."""


class PostgresServer(Server):
    """Where the statements of all processes arrive; `waiting` are those that wait for a lock, in their order."""

    def __init__(self, world: World, store: PostgresStore) -> None:
        super().__init__(world)
        self.store = store
        self.backends = store.backends
        self.connections: list[Connection] = []
        self.waiting: dict[Connection, Request] = {}
        self._databases: list[PostgresDatabase] = []

    def database(self, name: str, *, alone: bool, bucket: ports.Bucket | None = None) -> PostgresDatabase:
        made = PostgresDatabase(self, name, bucket)
        self._databases.append(made)
        return made

    def close(self) -> None:
        for database in self._databases:
            database.discard()
        for connection in tuple(self.connections):
            self.release(connection)

    def crash(self, down_s: float) -> int:
        """Every transaction that runs is rolled back. Commits that did not wait for the disk are not lost here."""
        for connection in tuple(self.connections):
            self._lose(connection)
        self.store.start()
        self.down_until = self.world.loop.time() + down_s
        return 0

    def travel_s(self) -> float:
        rng, weather = self.world.rng, self.world.weather
        stall = rng.random() * weather.stall_s if self.world.happens(weather.stalls / STATEMENTS) else 0.0
        return rng.expovariate(STATEMENTS / weather.transaction_s) + stall

    def is_refused(self) -> bool:
        world = self.world
        return world.loop.time() < self.down_until or world.happens(world.weather.refused / STATEMENTS)

    def serve(self, connection: Connection, request: Request) -> None:
        """A statement has arrived."""
        if connection.request is not request:
            return
        if connection.is_over and request.text != COMMIT:
            self.release(connection)
            return
        if self.is_refused():
            self._lose(connection)
            return
        if connection.is_writing and (error := self._fault(connection, request)) is not None:
            self._reply(connection, request, error)
            return
        if any(part in request.text for part in TIMED):
            self.store.set_clock()
        connection.has_heads |= _locks_heads(request.text)
        if request.text == COMMIT:
            self.store.note_commit(connection.backend)
        if self.backends.send(connection.backend, request.work):
            self._answered(connection, request)
        else:
            self.world.note(f"{connection.name} waits for a lock")
            is_head = _locks_heads(request.text) or (connection.has_heads and _needs_head(request.text))
            self.world.must(not is_head, "a batch waits for a session that another one has locked")
            self.waiting[connection] = request
            self.world.loop.call_later(LOCK_S, self._give_up, connection, request, context=self.context())

    def context(self) -> Any:
        return self.world.loop.world.context()

    def _fault(self, connection: Connection, request: Request) -> asyncpg.PostgresError | None:
        """What goes wrong once in some of the transactions, with any of their statements."""
        weather = self.world.weather
        if self.world.happens(weather.conflicts / STATEMENTS):
            error: asyncpg.PostgresError = asyncpg.SerializationError("another transaction came first")
        elif self.world.happens(weather.full / STATEMENTS):
            error = asyncpg.DiskFullError("the disk is full")
        else:
            return None
        if request.text == COMMIT:
            self.backends.end(connection.backend)
            self.look_again()
        return error

    def _answered(self, connection: Connection, request: Request) -> None:
        backend = connection.backend
        answer, backend.answer = backend.answer, None
        assert answer is not None
        error = answer.exception()
        if isinstance(error, asyncpg.UniqueViolationError):
            is_event = error.constraint_name == "pk_events"
            self.world.must(not is_event, "two transactions wrote the same event, and only the key has kept one out")
        if error is not None or not backend.is_in_transaction:  # One that has failed holds no lock any more.
            self.look_again()
        if connection.is_over:
            self.release(connection)
        elif request.text == COMMIT and self.world.happens(self.world.weather.answer_lost):
            self._lose(connection)
        else:
            self._reply(connection, request, error, None if error is not None else answer.result())

    def _reply(self, connection: Connection, request: Request, error: BaseException | None, result: Any = None) -> None:
        connection.request = None
        connection.idle_since = self.world.loop.time()
        self.world.loop.call_later(self.travel_s(), request.settle, error, result, context=self.context())

    def look_again(self) -> None:
        """A transaction has ended: of those that waited for it, some go on."""
        for connection, request in tuple(self.waiting.items()):
            if self.waiting.get(connection) is request and self.backends.look_again(connection.backend):
                del self.waiting[connection]
                self._answered(connection, request)

    def _give_up(self, connection: Connection, request: Request) -> None:
        """As `lock_timeout`, on the simulation's clock."""
        if self.waiting.get(connection) is request:
            del self.waiting[connection]
            self.backends.cancel(connection.backend)
            self._reply(connection, request, asyncpg.LockNotAvailableError("canceling statement due to lock timeout"))

    def _lose(self, connection: Connection) -> None:
        """The connection is cut; whoever waits for its answer learns of it."""
        request, connection.request = connection.request, None
        connection.is_over = True
        self.release(connection)
        if request is not None:
            self.world.loop.call_later(self.travel_s(), request.settle, _lost(), None, context=self.context())

    def release(self, connection: Connection) -> None:
        """The server notices that the connection has ended, and rolls back."""
        if connection not in self.connections:
            return
        self.connections.remove(connection)
        self.waiting.pop(connection, None)
        connection.request = None
        self.backends.give_back(connection.backend)
        self.look_again()

    def end_idle(self, connection: Connection, begun: int) -> None:
        """As `idle_in_transaction_session_timeout`, on the simulation's clock."""
        loop = self.world.loop
        if connection.is_over or connection.begun != begun or not connection.is_writing:
            return
        due = connection.idle_since + IDLE_S
        if connection.request is None and due <= loop.time():
            self.world.note(f"{connection.name} was idle in a transaction for too long")
            self._lose(connection)
        else:
            later = max(due, loop.time() + 1.0)
            loop.call_at(later, self.end_idle, connection, begun, context=self.context())


def _locks_heads(text: str) -> bool:
    """The statements of a batch that take heads, or leave out those that are locked."""
    return "given AS MATERIALIZED" in text or ("= ANY (" in text and "FOR UPDATE" in text)


def _needs_head(text: str) -> bool:
    """Those that change a session's row, or lock it by itself."""
    return text.startswith("UPDATE sessions") or ("FROM sessions" in text and "FOR UPDATE" in text)


def _lost() -> asyncpg.PostgresError:
    return asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")


class Request:
    """A statement on its way, or waiting."""

    def __init__(self, text: str, work: Work, answer: asyncio.Future[Any]) -> None:
        self.text = text
        self.work = work
        self.answer = answer

    def settle(self, error: BaseException | None, result: Any) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(error)


class Connection:
    """What a process has instead of asyncpg's connection. `request` is the statement that the server has not answered.

    `is_over`: one of both sides has ended it. `has_heads`: its transaction is a batch, which has locked its sessions.
    """

    def __init__(self, server: PostgresServer, name: str) -> None:
        self.name = name
        self.backend = server.backends.take()
        self.request: Request | None = None
        self.is_over = False
        self.idle_since = 0.0
        self.begun = 0
        self.has_heads = False
        self._server = server
        self._writes = False
        server.connections.append(self)

    @property
    def is_writing(self) -> bool:
        return self._writes and self.backend.is_in_transaction

    def _begin(self) -> None:
        self._writes = True
        self.has_heads = False
        self.begun += 1
        self.idle_since = self._server.world.loop.time()
        self._server.world.loop.call_later(
            IDLE_S, self._server.end_idle, self, self.begun, context=self._server.context()
        )

    def is_closed(self) -> bool:
        return self.is_over

    def terminate(self) -> None:
        """What is on its way arrives all the same."""
        if self.is_over:
            return
        self.is_over = True
        request = self.request
        if request is None or self in self._server.waiting:
            self._server.release(self)
        if request is not None:
            request.settle(_lost(), None)

    async def close(self, *, timeout: float | None = None) -> None:
        self.terminate()

    async def execute(self, text: str, *values: Any, timeout: float | None = None) -> str:
        status: str = await self.ask(text, lambda raw: raw.execute(text, *values), timeout)
        return status

    async def executemany(self, text: str, values: Iterable[Sequence[Any]], *, timeout: float | None = None) -> None:
        await self.ask(text, lambda raw: raw.executemany(text, values), timeout)

    async def fetch(self, text: str, *values: Any, timeout: float | None = None) -> Any:
        return await self.ask(text, lambda raw: raw.fetch(text, *values), timeout)

    async def fetchrow(self, text: str, *values: Any, timeout: float | None = None) -> Any:
        return await self.ask(text, lambda raw: raw.fetchrow(text, *values), timeout)

    async def prepare(self, text: str, *, name: str | None = None, timeout: float | None = None) -> Statement:
        backend = self._open()
        if text not in backend.prepared:
            backend.prepared[text] = self._server.backends.run(backend.raw.prepare(text))
            if not backend.is_in_transaction:  # The driver has begun one for the statement, which may never be sent.
                self._server.backends.run(backend.raw.execute("SELECT"))
        return Statement(self, text, backend.prepared[text])

    async def set_type_codec(self, name: str, **options: Any) -> None:
        """A backend keeps what its first connection has set."""
        backend = self._open()
        if name not in backend.codecs:
            backend.codecs.add(name)
            self._server.backends.run(backend.raw.set_type_codec(name, **options))

    def transaction(self, *, isolation: str | None, readonly: bool, deferrable: bool) -> Transaction:
        return Transaction(self, isolation)

    def _open(self) -> Backend:
        if self.is_over or self._server.world.loop.is_ending:
            raise asyncpg.InterfaceError("the connection is closed")
        return self.backend

    async def ask(self, text: str, work: Work, timeout: float | None) -> Any:
        """Raises what the server answers, ConnectionDoesNotExistError, InterfaceError, TimeoutError."""
        backend, server = self._open(), self._server
        if self.request is not None:
            raise asyncpg.InterfaceError("cannot perform operation: another operation is in progress")
        if text.startswith(QUIET):
            self._writes = text.startswith(WRITES)
            if self._writes:
                text = WRITES
                self._begin()
            if text != READS and (text.startswith(READS) or backend.is_in_transaction):
                server.backends.run(backend.raw.execute(text))
            if not backend.is_in_transaction:
                server.look_again()
            return None
        loop = server.world.loop
        self.request = Request(text, work, loop.create_future())
        answer = self.request.answer
        loop.call_later(server.travel_s(), server.serve, self, self.request, context=server.context())
        async with asyncio.timeout(timeout):
            return await answer


class Transaction:
    """Of statements that SQLAlchemy sends."""

    def __init__(self, connection: Connection, isolation: str | None) -> None:
        self._connection = connection
        self._begin = f"BEGIN ISOLATION LEVEL {isolation.replace('_', ' ')}" if isolation else "BEGIN"

    async def start(self) -> None:
        await self._connection.execute(self._begin)

    async def rollback(self) -> None:
        await self._connection.execute("ROLLBACK")


class Statement:
    """What a process has instead of asyncpg's prepared statement."""

    def __init__(self, connection: Connection, text: str, prepared: Any) -> None:
        self._connection = connection
        self._text = text
        self._prepared = prepared
        self.get_attributes = prepared.get_attributes
        self.get_statusmsg = prepared.get_statusmsg

    async def fetch(self, *values: Any) -> Any:
        return await self._connection.ask(self._text, lambda _: self._prepared.fetch(*values), ANSWER_S)


class PostgresDatabase(Database):
    """The real one, over simulated connections."""

    def __init__(self, server: PostgresServer, name: str, bucket: ports.Bucket | None) -> None:
        super().__init__(server.store.url, bucket=bucket, points=store_points())
        self.name = name
        assert self._reading is not None
        assert self._writing is not None
        assert self._postgres is not None
        assert self._autocommit is not None
        self._server = server
        self._connections: list[Connection] = []
        for engine in (self._reading.sync_engine, self._writing.sync_engine):
            event.listen(engine, "do_connect", self._connects)
            server.store.keep_compiled(engine)
        self._postgres.connections.compiler = self._autocommit.connections.compiler = server.store.compiler

    def _connects(self, dialect: Any, record: Any, arguments: Any, parameters: dict[str, Any]) -> None:
        parameters["async_creator_fn"] = self._connect

    async def _connect(self, *arguments: Any, **options: Any) -> Connection:
        await asyncio.sleep(self._server.travel_s())
        if self._server.is_refused():
            raise ConnectionRefusedError
        made = Connection(self._server, f"connection {len(self._connections) + 1} of {self.name}")
        self._connections.append(made)
        return made

    def die(self) -> None:
        """The process is gone, and with it its ends of all connections."""
        for connection in self._connections:
            connection.terminate()

    def discard(self) -> None:
        """Nothing is left that SQLAlchemy would warn of."""
        assert self._postgres is not None
        assert self._autocommit is not None
        self.die()
        for connection, _ in (*self._postgres.connections._idle, *self._autocommit.connections._idle):
            assert connection.sync_connection is not None
            _drop(connection.sync_connection)
            connection.sync_connection.close()
