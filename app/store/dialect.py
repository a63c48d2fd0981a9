"""How SQLite and PostgreSQL differ in functions, pragmas, the transaction and errors.

Statements are SQLAlchemy Core, but for claims and commits (`sqlite_tx`, `postgres_tx`). On SQLite the writer
compiles each once and passes it to the driver: Core's cost per execution (about 40 µs) would be most of its time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    ColumnElement,
    Connection,
    Dialect,
    Double,
    FromClause,
    Select,
    Table,
    bindparam,
    column,
    func,
)
from sqlalchemy.exc import DBAPIError, InterfaceError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import ClauseElement, Executable, Insert
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import NullType, TypeEngine

from app.domain.groups import GroupKey
from app.errors import AppError, StoreFull, StoreUnavailable

Row = Sequence[Any]
Parameters = Mapping[str, Any]


class _Expression(FunctionElement[Any]):
    """SQL without arguments, spelled differently in the two databases."""

    inherit_cache = True
    sqlite: str
    postgresql: str


@compiles(_Expression)
def _on_sqlite(element: _Expression, compiler: Any, **options: Any) -> str:
    return element.sqlite


@compiles(_Expression, "postgresql")
def _on_postgresql(element: _Expression, compiler: Any, **options: Any) -> str:
    return element.postgresql


def _expression(name: str, kind: TypeEngine[Any], sqlite: str, postgresql: str) -> type[_Expression]:
    """Each has a class of its own, by which Core tells them apart in the statements that it keeps compiled."""
    return type(name, (_Expression,), {"inherit_cache": True, "type": kind, "sqlite": sqlite, "postgresql": postgresql})


current_tx = _expression("current_tx", BigInteger(), "0", "(pg_current_xact_id()::text::bigint)")
"""The id of the running transaction; 0 on SQLite, which has one writer."""


class tx_not_before(FunctionElement[Any]):
    """The id of the running transaction, or the given one if that is higher; 0 on SQLite."""

    inherit_cache = True
    type = BigInteger()


@compiles(tx_not_before)
def _no_tx(element: tx_not_before, compiler: Any, **options: Any) -> str:
    return current_tx.sqlite


@compiles(tx_not_before, "postgresql")
def _tx_not_before(element: tx_not_before, compiler: Any, **options: Any) -> str:
    return f"GREATEST({current_tx.postgresql}, {compiler.process(element.clauses, **options)})"


oldest_tx = _expression("oldest_tx", BigInteger(), "1", "(pg_snapshot_xmin(pg_current_snapshot())::text::bigint)")
"""The oldest transaction that may still commit; all events with a lower id are complete and in order."""

next_tx = _expression("next_tx", BigInteger(), "1", "(pg_snapshot_xmax(pg_current_snapshot())::text::bigint)")
"""The first transaction that has not begun; `oldest_tx` reaches it when all that run now have ended."""

oldest_runs = _expression(
    "oldest_runs",
    Boolean(),
    "NULL",
    """(CASE WHEN pg_snapshot_xmin(pg_current_snapshot()) < pg_snapshot_xmax(pg_current_snapshot())
        THEN pg_xact_status(pg_snapshot_xmin(pg_current_snapshot())) = 'in progress' END)""",
)
"""Does the transaction that `oldest_tx` names still run? None: there is none yet, since nothing runs."""

log_written = _expression("log_written", BigInteger(), "0", "((pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint)")
"""How far PostgreSQL has written its log of changes, in bytes; 0 on SQLite."""

log_synced = _expression("log_synced", BigInteger(), "0", "((pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint)")
"""How far that log is on the disk, in bytes; 0 on SQLite."""

sync_delay_s = _expression(
    "sync_delay_s",
    Double(),
    "0.0",
    "(3 * extract(epoch from current_setting('wal_writer_delay')::interval))::double precision",
)
"""Within how many seconds PostgreSQL syncs a commit that did not wait for it; 0 on SQLite.

Three times wal_writer_delay: https://www.postgresql.org/docs/current/wal-async-commit.html
"""

now = _expression(
    "now",
    Double(),
    "((julianday('now') - 2440587.5) * 86400.0)",
    "extract(epoch from clock_timestamp())::double precision",
)
"""Seconds since the epoch by the database's clock."""

up_since = _expression("up_since", Double(), "0.0", "extract(epoch from pg_postmaster_start_time())::double precision")
"""When the database server was started, by its own clock; 0 on SQLite."""

keep_pins = _expression("keep_pins", NullType(), "1", "pg_advisory_xact_lock_shared(8384003170512)")
"""Until the transaction ends, no checkpoint is made; others may do the same meanwhile. SQLite has one writer."""

change_pins = _expression("change_pins", NullType(), "1", "pg_advisory_xact_lock(8384003170512)")
"""Wait for the transactions that keep the pins; until this one ends, no other begins to."""

change_schema = _expression("change_schema", NullType(), "1", "pg_advisory_xact_lock(8384003170513)")
"""Until the transaction ends, no other process migrates the database. On SQLite the file's lock does that."""

used_bytes = _expression(
    "used_bytes",
    BigInteger(),
    """(((SELECT page_count FROM pragma_page_count()) - (SELECT freelist_count FROM pragma_freelist_count()))
        * (SELECT page_size FROM pragma_page_size()))""",
    "pg_database_size(current_database())",
)
"""The database's size in bytes, without free pages."""


class begins_with(FunctionElement[bool]):
    """Does the first text begin with the second? On SQLite this uses an index, on PostgreSQL it does not.

    It has no type: as a Boolean, SQLite would compare it with 1 and not use the index.
    """

    inherit_cache = True


@compiles(begins_with)
def _between(element: begins_with, compiler: Any, **options: Any) -> str:
    text, start = (compiler.process(clause, **options) for clause in element.clauses)
    return f"({text} >= {start} AND {text} < {start} || char(1114111))"


@compiles(begins_with, "postgresql")
def _starts_with(element: begins_with, compiler: Any, **options: Any) -> str:
    return f"starts_with({compiler.process(element.clauses, **options)})"


class contains(FunctionElement[bool]):
    """Does the first text contain the second, or do the first bytes?"""

    inherit_cache = True
    type = Boolean()


@compiles(contains)
def _instr(element: contains, compiler: Any, **options: Any) -> str:
    return f"(instr({compiler.process(element.clauses, **options)}) > 0)"


@compiles(contains, "postgresql")
def _position(element: contains, compiler: Any, **options: Any) -> str:
    whole, part = (compiler.process(clause, **options) for clause in element.clauses)
    return f"(position({part} in {whole}) > 0)"


class Pins(NamedTuple):
    """What is kept of sessions. `upto`: the last event of a session that is pinned; `of_heads`: a condition on heads;
    `restoring`: a row while the run `named` is being taken back to what was pinned."""

    upto: ForEach
    of_heads: Callable[[FromClause], ColumnElement[bool]]
    restoring: Executable


class Departed(NamedTuple):
    """Sessions that are not in the database any more, and whose ids are taken. `ids`: those of some ids; `generations`:
    as `sessions.generations`, of a run and a name; `attempted`: as `sessions.attempted`, of a run, a name, a mark and
    an agent."""

    ids: ForEach
    generations: Callable[[str, str], Select[Any]]
    attempted: Callable[[str, str, str, str], Select[Any]]


class NoRoom(NamedTuple):
    """A run takes `left` more sessions, and further ones are refused with `error`."""

    left: int
    error: AppError


class StorePoints:
    """The points at which features write with the kernel, in its transactions: lists that are filled before the store
    is opened, and called in their order. With an empty list a line does nothing."""

    def __init__(self) -> None:
        self.creating: list[Callable[[Tx, Mapping[str, int]], Mapping[str, NoRoom]]] = []
        """So many sessions are about to be created in each of these runs; gives those that may not take all. Runs."""

        self.closed: list[Callable[[Tx, str, str | None], None]] = []
        """A session has been closed; its id, and the name of the session that its engine holds for it and must be told
        of, if there is one. Session control."""

        self.changed: list[Callable[[Tx, Sequence[GroupKey]], None]] = []
        """A session of each of these groups has changed. Groups."""

        self.voided: list[Callable[[Tx, str, Sequence[tuple[int, int]]], None]] = []
        """A close or a restore has ended these claims of a session, each a fence and a process, which may live and go
        on with the turn. Objects."""

        self.freed: list[Callable[[Tx, Sequence[tuple[str, str]]], None]] = []
        """No chunk refers to these objects any more, each told by its name and its session. Objects."""

        self.erased: list[Callable[[Tx, str], None]] = []
        """A session is being erased. Objects."""

        self.unstaged: list[Callable[[Tx, Sequence[tuple[str, int | None]]], None]] = []
        """What these turns have staged is not needed any more, each told by its session and its fence; None: that of
        all turns of the session. Resume."""

        self.run_ended: list[Callable[[Tx, str], None]] = []
        """A run is closed or erased. Run tokens."""
        self.run_erased: list[Callable[[Tx, str], None]] = []
        """All sessions of a run are erased, and its name is free. Checkpoints, groups."""

        self.departed: list[Departed] = []
        """Where sessions may be that are not in the database. Archive."""

        self.pins: list[Pins] = []
        """What is kept of sessions (`store.pins`). Checkpoints."""

        self.tables: list[Table] = []
        """Tables with rows of sessions: all of a session's are read where a page of one may be damaged."""


class ClaimRow(NamedTuple):
    """A claim: the state that its session has to be in, and the rows to write.

    It fits if the log ends with event `known`, written at `known_at`, if `known_turns` turns were committed and
    `turn - 1` numbers given, and if less than `most` turns are open. Its fence, and its event's seq, are `known + 1`.
    The event has this `version` and `data`. The two databases' statements name the fields in this order.
    """

    session_id: str
    known: int
    known_turns: int
    most: int
    turn: int
    known_at: float
    parent: int
    incarnation: int
    body_hash: str
    retry_key: str | None
    adapter: str | None
    at: float
    reserved: int | None
    version: int
    data: bytes


class CommitRow(NamedTuple):
    """A commit: the state that its session has to be in, and what is written of the head and the turn.

    It fits if the log ends with event `known`, if `known_turns` turns were committed, and if the turn with this fence,
    process and time is open; that row is deleted. `events` of the log follow. PostgreSQL's statement names the fields
    in this order, SQLite's all but the weight version.
    """

    session_id: str
    known: int
    known_turns: int
    fence: int
    incarnation: int
    opened_at: float
    events: int
    at: float
    weight_version: int | None
    engine: str | None
    tool_errors: int
    turn: int
    parent: int
    segment: int
    choice_index: int
    protocol: str
    tokens: bytes | None
    exchange: bytes


class LogRow(NamedTuple):
    """An event of the log."""

    session_id: str
    seq: int
    type: str
    version: int
    at: float
    data: bytes


class Reads(Protocol):
    """Runs Core statements and returns plain rows."""

    def one(self, statement: Executable, parameters: Parameters) -> Row | None: ...

    def all(self, statement: Executable, parameters: Parameters) -> Sequence[Row]: ...


class Tx(Reads, Protocol):
    """A write transaction.

    `is_remote`: each statement is a round trip to a server, so one statement for many operations is worthwhile.
    `points`: what features write with the kernel.
    """

    points: StorePoints

    @property
    def is_remote(self) -> bool: ...

    def run(self, statement: Executable, parameters: Parameters) -> int:
        """Returns the number of changed rows."""
        ...

    def run_all(self, statement: Executable, parameters: Sequence[Parameters]) -> None:
        """`run` with each of the parameters."""
        ...

    def each(self, statement: ForEach, rows: Sequence[dict[str, Any]]) -> Sequence[Row]:
        """The statement for each of the rows, in one round trip; the rows that it returns, in any order."""
        ...

    def insert(self, statement: Insert, rows: Sequence[dict[str, Any]]) -> None: ...

    def lock(self, statement: Executable, parameters: Parameters) -> None:
        """Lock the row of session `sid` (SELECT … FOR UPDATE); a no-op on SQLite."""
        ...

    def add_locked(self, session_ids: Collection[str]) -> None:
        """Tell the transaction which sessions' rows it has locked already."""
        ...

    def open_turns(self, opened: Sequence[ClaimRow]) -> Collection[str]:
        """Write the claims that fit, and that nobody else has locked, each of another session; returns their ids."""
        ...

    def commit_turns(self, committed: Sequence[CommitRow], log: Sequence[LogRow]) -> Collection[str]:
        """Write the commits that fit, and that nobody else has locked, each of another session, with their events of
        `log`; returns their ids."""
        ...

    @property
    def positions(self) -> Iterator[int] | None:
        """The positions of the next events, or None if the database assigns them."""
        ...


class ForEach:
    """A statement for many rows of parameters: once for all of them (`many`), or for each (`single`).

    `build` makes it of their columns; `types` are those by name. No name may be that of a column that it sets.
    """

    def __init__(self, build: Callable[[Any], Executable], **types: Any) -> None:
        lists = [bindparam(name, type_=ARRAY(kind)) for name, kind in types.items()]
        names: list[ColumnElement[Any]] = [column(name) for name in types]
        rows = func.unnest(*lists).table_valued(*names, name="given").render_derived()
        self.single = build(SimpleNamespace(**{name: bindparam(name, type_=kind()) for name, kind in types.items()}))
        self.many = build(rows.c)


class CoreReads:
    """The reads of a transaction on a connection that is no writer's, by SQLAlchemy's own execution."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def one(self, statement: Executable, parameters: Parameters) -> Row | None:
        return self._connection.execute(statement, parameters).first()

    def all(self, statement: Executable, parameters: Parameters) -> Sequence[Row]:
        return self._connection.execute(statement, parameters).all()


class Compiler:
    """Compiles Core statements once for the driver, with their values in positional order."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._compiled: dict[tuple[int, tuple[str, ...] | None], _Compiled] = {}

    def bind(
        self, statement: Executable, parameters: Parameters, columns: tuple[str, ...] | None = None
    ) -> tuple[str, list[Any]]:
        """The SQL text and its values; `columns` are those that an insert fills. TypeError for a statement with
        `.in_()`."""
        key = (id(statement), columns)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(statement, columns)
        return compiled.sql, [parameters.get(name, default) for name, default in compiled.names]

    def _compile(self, statement: Executable, columns: tuple[str, ...] | None) -> _Compiled:
        assert isinstance(statement, ClauseElement)
        compiled = statement.compile(dialect=self._dialect, column_keys=None if columns is None else list(columns))
        assert isinstance(compiled, SQLCompiler)
        if lists := sorted(parameter.key for parameter in compiled.post_compile_params):
            raise TypeError(
                f"{', '.join(lists)}: a statement with .in_() has another text for each number of values, and it is "
                "compiled once; compare with or_() of fixed values, or run it once for each value"
            )
        names = compiled.positiontup or []
        return _Compiled(statement, str(compiled), [(name, compiled.params.get(name)) for name in names])


class _Compiled(NamedTuple):
    """`statement` is referenced so that its id is not reused."""

    statement: Executable
    sql: str
    names: list[tuple[str, Any]]


FILE_PRAGMAS = (
    "PRAGMA auto_vacuum = INCREMENTAL",
    "PRAGMA journal_mode = WAL",
)
"""Stored in the file and set when it is created: setting `auto_vacuum` is a write, which a lock or a full disk
prevents."""

PRAGMAS = (
    "PRAGMA foreign_keys = ON",
    "PRAGMA secure_delete = ON",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA cache_size = -65536",
    "PRAGMA wal_autocheckpoint = 32000",
    "PRAGMA journal_size_limit = 67108864",
)

READER_CACHE = "PRAGMA cache_size = -8192"
"""Each reading connection has its own page cache; the operating system caches the same pages."""

MIN_SQLITE = (3, 35, 0)
"""The first version with RETURNING."""

_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_TOOBIG})
_WHOLE_DATABASE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_INTERRUPT,
    }
)
_UNAVAILABLE_CLASSES = ("08", "53", "57", "58", "40", "25", "55")
"""SQLSTATE classes: connection, resources, operator intervention, system, rollback, state, lock."""


def store_error(error: BaseException) -> AppError | None:
    """The client's error for a driver's error; None for a fault of our own."""
    if isinstance(error, PoolTimeout):
        return StoreUnavailable("all connections to the database are busy")
    if isinstance(error, DBAPIError):
        if isinstance(error, InterfaceError) or error.connection_invalidated:
            return StoreUnavailable("the connection to the database was lost")
        return None if error.orig is None else store_error(error.orig)
    if isinstance(error, sqlite3.Error):
        extended = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        code = extended & 0xFF
        if code in _FULL or extended == sqlite3.SQLITE_IOERR_SHMSIZE:
            return StoreFull("the database is full")
        return StoreUnavailable(f"the database answered {_code_name(error)}") if code in _WHOLE_DATABASE else None
    if isinstance(error, OSError):
        return StoreUnavailable(f"the database cannot be reached: {type(error).__name__}")
    state = getattr(error, "sqlstate", None)
    if state == "53100":
        return StoreFull("the database is full")
    if isinstance(state, str) and state.startswith(_UNAVAILABLE_CLASSES):
        return StoreUnavailable(f"the database answered {state}")
    return None


class ConnectionLost(Exception):
    """The connection to the database was lost; nothing was written, and a retry is safe."""


class WriteConflict(Exception):
    """Another process's transaction came first; nothing was written, and a retry is safe."""


_CONFLICTS = frozenset({"40001", "40P01", "23505"})
"""SQLSTATEs: serialization failure, deadlock, unique violation."""


def is_conflict(error: BaseException) -> bool:
    origin = error.orig if isinstance(error, DBAPIError) else error
    return getattr(origin, "sqlstate", None) in _CONFLICTS


def is_busy(error: sqlite3.Error) -> bool:
    """Another connection holds the lock."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _code_name(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", type(error).__name__)
