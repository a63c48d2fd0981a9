"""Write transactions on PostgreSQL, on the driver itself, and what happens when the connection is lost.

    lost before COMMIT      nothing is written: repeated on another connection
    lost during COMMIT      the log is searched for the transaction's last event
    no connection           retried for RECONNECT_S from the first failure; then StoreUnavailable

Nothing relies on server session state beyond a transaction, so a pooler may give each transaction another server
session.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg
from sqlalchemy import Connection, bindparam, func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from app.errors import StartupError, StoreUnavailable
from app.store import statements as sql
from app.store.dialect import Compiler, ConnectionLost, Parameters, Row, StorePoints, Tx
from app.store.ports import Committed
from app.store.postgres_tx import LastEvent, PostgresTx
from app.store.schema import events

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

T = TypeVar("T")

log = logging.getLogger("turnlog.postgres")

DRIVER_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""Errors that the driver raises without SQLAlchemy's translation; InternalClientError when a server closes an idle
connection."""

RECONNECT_S = 10.0
"""How long to retry a lost server before requests are answered 503: enough for a restart or failover."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5

AT_ONCE = 6
"""Single statements that run at a time, each on one of the connections for reads (`database.READERS`).

Measured with turns that all miss the cache: with three, turns wait for each other and make smaller
batches, with eight it is as with six.
"""

KEPT = 3
"""Of these connections, and of those for writes, so many stay taken from the pool afterwards; others have the rest."""

RECYCLE_S = 1800
"""Age after which a connection is replaced, so that connections spread again after a failover."""

_event = select(events.c.data, events.c.at).where(
    events.c.session_id == bindparam("sid"), events.c.seq == bindparam("place")
)


class CommitUnknown(Exception):
    """The connection ended during COMMIT. `last` is None where the transaction wrote no event."""

    def __init__(self, last: LastEvent | None, result: Any) -> None:
        super().__init__("the connection was lost during a commit")
        self.last = last
        self.result = result


class Reconnect:
    """Retries while the server is lost, for RECONNECT_S from the first failure of any caller."""

    def __init__(self) -> None:
        self._missed_at: float | None = None

    async def retrying(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The attempt's result, retried after ConnectionLost. Raises StoreUnavailable if that goes on."""
        clock = asyncio.get_running_loop().time
        pause, give_up_at = FIRST_PAUSE_S, math.inf
        while True:
            try:
                result = await attempt()
            except ConnectionLost as error:
                now = clock()
                if self._missed_at is None:
                    self._missed_at = now
                    log.warning("lost the database (%s); waiting for it", error)
                # Other callers may succeed meanwhile; one that never does gives up all the same.
                give_up_at = min(give_up_at, self._missed_at + RECONNECT_S)
                if now + pause > give_up_at:
                    raise StoreUnavailable(f"the database cannot be reached: {error}") from error
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            else:
                if self._missed_at is not None:
                    log.warning("the database is back after %.1f s", clock() - self._missed_at)
                    self._missed_at = None
                return result


async def answered(connection: AsyncConnection, work: Callable[[Connection], T]) -> T:
    """The result of `work`. Raises TimeoutError if the server does not answer.

    The connection is dropped then: a rollback on it would wait again.
    """
    try:
        return await connection.run_sync(work)
    except TimeoutError:
        await connection.run_sync(_drop)
        raise


class KeptConnections:
    """Connections of a pool, of which up to KEPT stay taken from it between their uses: taking one costs a quarter of a
    small transaction, and half of a single statement."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.compiler = Compiler(engine.dialect)
        self._engine = engine
        self._idle: list[tuple[AsyncConnection, float]] = []

    async def run(self, work: Callable[[Connection], T]) -> T:
        """What `work` gives, which drops a connection that may be in the middle of a statement. Raises ConnectionLost,
        and what the driver raises."""
        try:
            connection, since = self._idle.pop() if self._idle else (await self._engine.connect(), time.monotonic())
            try:
                result = await answered(connection, work)
            except BaseException:
                await connection.close()
                raise
        except (DBAPIError, OSError, *DRIVER_ERRORS) as error:
            if is_lost(error):
                await self.close()  # The others are of the same server.
                raise ConnectionLost(_cause(error)) from error
            raise
        if len(self._idle) < KEPT and time.monotonic() - since < RECYCLE_S:
            self._idle.append((connection, since))
        else:
            await connection.close()
        return result

    async def close(self) -> None:
        """Drop those that are not in use."""
        while self._idle:
            connection, _ = self._idle.pop()
            await connection.run_sync(_drop)
            await connection.close()


class PostgresWriter:
    """Write transactions. `committed` is called after durable ones."""

    def __init__(self, engine: AsyncEngine, reconnect: Reconnect, committed: Committed, points: StorePoints) -> None:
        self.connections = KeptConnections(engine)
        self._committed = committed
        self._points = points
        self._reconnect = reconnect

    async def write(self, function: Callable[[Tx], T], *, durable: bool) -> T:
        """Run `function` in one transaction, with retries. Raises what the driver raises, StoreUnavailable."""
        return await self._reconnect.retrying(lambda: self._once(function, durable))

    async def _once(self, function: Callable[[Tx], T], durable: bool) -> T:
        try:
            return await self.connections.run(partial(self._transact, function=function, durable=durable))
        except CommitUnknown as unknown:
            if unknown.last is None:
                raise StoreUnavailable(
                    "the connection was lost during a commit, and whether it succeeded cannot be looked up"
                ) from unknown
            look = partial(self._holds, unknown.last)
            try:
                is_there = await self._reconnect.retrying(lambda: self.connections.run(look))
            except (DBAPIError, *DRIVER_ERRORS) as error:
                # A conflict or a full disk of the look is none of the transaction, which would be repeated or said to
                # be refused, and may be done.
                raise StoreUnavailable(f"whether a commit succeeded could not be looked up: {_cause(error)}") from error
            if not is_there:
                raise ConnectionLost("the connection was lost before a commit") from unknown
            result: T = unknown.result
            return result

    def _transact(self, connection: Connection, *, function: Callable[[Tx], T], durable: bool) -> T:
        tx = PostgresTx(connection, self.connections.compiler, self._points)
        try:
            tx.begin(durable)
            result = function(tx)
        except BaseException as error:
            _give_up(connection, tx, error)
            raise
        began = time.perf_counter()
        try:
            tx.commit()
        except BaseException as error:
            _drop(connection)
            if is_lost(error):
                raise CommitUnknown(tx.last_event, result) from error
            raise
        if durable:
            self._committed(time.perf_counter() - began)
        return result

    def _holds(self, last: LastEvent, connection: Connection) -> bool:
        """Is the event durably in the log?

        The lock waits for a transaction that may still be writing it. It is a write too, so its own commit waits until
        a synchronous standby has all earlier commits.
        """
        tx = PostgresTx(connection, self.connections.compiler, self._points)
        try:
            tx.begin(durable=True)
            tx.lock(sql.lock_head, {"sid": last.session_id})
            row = tx.one(_event, {"sid": last.session_id, "place": last.seq})
            tx.commit()
        except BaseException as error:
            _give_up(connection, tx, error)
            raise
        return row is not None and tuple(row) == (last.data, last.at)


class PostgresAutocommit:
    """Single statements without a transaction: a quarter of the cost of a read. Up to AT_ONCE run at a time."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.connections = KeptConnections(engine)
        self._free = asyncio.Semaphore(AT_ONCE)

    async def all(self, statement: Executable, parameters: Parameters) -> Sequence[Row]:
        """The rows. Raises ConnectionLost, and what the driver raises."""

        def ask(connection: Connection) -> Sequence[Row]:
            try:
                return PostgresTx(connection, self.connections.compiler, StorePoints()).all(statement, parameters)
            except BaseException:
                _drop(connection)
                raise

        async with self._free:
            return await self.connections.run(ask)


def _give_up(connection: Connection, tx: PostgresTx, error: BaseException) -> None:
    """Roll back after an error; drop a connection that may be in the middle of a statement."""
    if isinstance(error, asyncpg.PostgresError) and not is_lost(error):
        try:
            tx.rollback()
        except DRIVER_ERRORS:
            _drop(connection)
    else:
        _drop(connection)


def _drop(connection: Connection) -> None:
    """Close the connection without a request to the server, which may not answer."""
    if not connection.invalidated:
        raw = connection.connection.driver_connection
        if raw is not None:
            raw.terminate()
        connection.invalidate()


_GONE = ("08", "57P", "53300", "25006")
"""SQLSTATE prefixes: connection, operator intervention, too many connections, read-only standby."""


def is_lost(error: BaseException) -> bool:
    """Was the connection to the server lost? The request itself is not at fault."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    state = getattr(origin, "sqlstate", None)
    if isinstance(state, str):
        return state.startswith(_GONE)
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or isinstance(error.__cause__, OSError)
    return isinstance(error, OSError | asyncpg.InternalClientError) or (
        isinstance(error, asyncpg.InterfaceError) and not isinstance(error, ValueError)
    )


def _cause(error: BaseException) -> str:
    origin = (error.orig or error) if isinstance(error, DBAPIError) else error
    return f"{type(origin).__name__} {getattr(origin, 'sqlstate', None) or ''}".strip()


_conditions = select(func.pg_is_in_recovery(), func.current_setting("server_encoding"))
_promises = select(
    func.current_setting("fsync"),
    func.current_setting("synchronous_commit"),
    func.current_setting("synchronous_standby_names"),
    select(func.count()).select_from(text("pg_stat_replication")).scalar_subquery(),
)


async def require_usable(connection: AsyncConnection) -> None:
    """Raises StartupError on a standby, and where a database cannot hold every text."""
    standby, encoding = (await connection.execute(_conditions)).one()
    if standby:
        raise StartupError("the database is a standby, which cannot be written to: give the primary's address")
    if encoding != "UTF8":
        raise StartupError(
            f"the database has the encoding {encoding}, which cannot store every text: TURNLOG_DATABASE_URL "
            "must name one made with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )


async def warn_of_weak_promises(connection: AsyncConnection) -> None:
    """Warn about settings that break "acknowledged means on disk"."""
    fsync, synced, names, followers = (await connection.execute(_promises)).one()
    if fsync == "off":
        log.warning("PostgreSQL runs with fsync=off: a crash of its machine loses acknowledged turns")
    if followers and not names:
        log.warning(
            "PostgreSQL has %d standbys, none of them synchronous: a failover to one can lose acknowledged turns; "
            "set synchronous_standby_names",
            followers,
        )
    if names and synced in ("local", "remote_write"):
        log.info("synchronous_commit=%s is raised to on for acknowledgements", synced)
