"""PostgreSQL: the tables that only grow are partitioned, and a partition that holds no row any more is dropped.

To drop one gives its room back to the disk at once, which deleting its rows and VACUUM does not. The number of a
partition is the day on which it was begun (since 1970, by the database's clock); a store from before has partition 0.
New rows go into the newest, which the column `part` has as its default: no statement of the service names it.

The keys are those of each partition. No two rows of the whole table have the same: the version of a head, which is
changed under its row's lock, numbers events and fences; turns are numbered there too, and blobs and chunks belong to a
turn's fence or to the session's creation. A row that is moved leaves its old partition in the same transaction.

A read of a session looks into every partition, so there are at most `MOST`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import msgspec
from sqlalchemy import Connection, Table, TextClause, select, text

from app.crash_points import reach
from app.errors import StoreUnavailable
from app.store import statements as sql
from app.store.broken import Content
from app.store.dialect import Tx, now
from app.store.log import BaseOperation, StoreOperation
from app.store.packs.rows import holds_token
from app.store.ports import Database, Writer
from app.store.schema import blobs, chunks, events, refused_replies, turns

log = logging.getLogger("turnlog.partitions")

TABLES = {table.name: table for table in (events, turns, blobs, chunks, refused_replies)}

PART = "part"
"""The column that says which partition has a row."""

MOST = 4
"""Partitions of a table at the same time; `python -m ops.bench partitions` measures what they cost."""

FEW_ROWS = 10_000
"""The rows left in an old partition are moved if they are at most so many, ..."""

SMALL = 10
"""... and their content is at most this part of the partition's size."""

STEP = 100
"""Sessions read in one query."""

LOOK_S = 60.0
"""Pause between two looks at the partitions, in seconds."""

LOCK_TIMEOUT = "SET LOCAL lock_timeout = '200ms'"
"""How long a change of partitions may wait for the table, and turns for that change."""

_NAME = re.compile(rf"({'|'.join(TABLES)})_p\d+")


def is_partition(name: str) -> bool:
    """Is this the name of a partition?"""
    return _NAME.fullmatch(name) is not None


def partition(table: str, number: int) -> str:
    """The name of a partition of `table`."""
    return f"{table}_p{number}"


class Parts(msgspec.Struct, frozen=True):
    """The numbers of a table's partitions, oldest first, and the database's day."""

    numbers: tuple[int, ...]
    today: int


def parts_of(connection: Connection, table: str) -> Parts:
    """The partitions of a table; only on PostgreSQL."""
    names = connection.execute(_NAMES, {"table": table}).scalars()
    return Parts(tuple(sorted(int(name.rpartition("_p")[2]) for name in names)), int(clock(connection) // 86400))


def clock(connection: Connection) -> float:
    """The database's time, in seconds since 1970."""
    found: float = connection.execute(select(now())).scalar_one()
    return found


def sessions_in(connection: Connection, table: str, number: int, limit: int) -> list[str]:
    """Some of the sessions that have rows in this partition, in their order."""
    found = connection.execute(text(_SESSIONS.format(name=partition(table, number))), {"most": limit})
    return list(found.scalars())


def is_nearly_empty(connection: Connection, table: str, number: int) -> bool:
    """Are a partition's rows few, and small against its size? No more than `FEW_ROWS` and one are read."""
    columns = [column.name for column in TABLES[table].columns if isinstance(column.type, Content)]
    content = " + ".join(f"coalesce(pg_column_size({name}), 0)" for name in columns)
    name = partition(table, number)
    some = f"SELECT {content} AS bytes FROM {name} LIMIT {FEW_ROWS + 1}"
    rows, live, size = connection.execute(
        text(f"SELECT count(*), coalesce(sum(bytes), 0), pg_table_size('{name}') FROM ({some}) AS found")
    ).one()
    return bool(rows <= FEW_ROWS and live * SMALL <= size)


class BeginPartition(StoreOperation, frozen=True):
    """New rows of the table go into a new partition from now on. Nothing is done without the current token."""

    token: str
    table: str
    number: int

    def apply(self, tx: Tx) -> bool:
        if not holds_token(tx, self.token):
            return False
        for statement in _begin(TABLES[self.table], self.number):
            tx.one(statement, {})
        reach("in_begin_partition")
        return True


class MoveRows(BaseOperation, frozen=True):
    """Move a session's rows from one partition to another, with all their values. Its writers wait meanwhile."""

    durable: ClassVar[bool] = False
    token: str
    session_id: str
    table: str
    old: int
    new: int

    @property
    def size(self) -> int:
        return 1 << 20

    def apply(self, tx: Tx) -> bool:
        if not holds_token(tx, self.token):
            return False
        tx.lock(sql.lock_head, {"sid": self.session_id})
        moved = tx.run(_MOVE[self.table], {"sid": self.session_id, "old": self.old, "new": self.new})
        reach("in_move_rows")
        return moved > 0


class DropPartition(StoreOperation, frozen=True):
    """Drop a partition that was seen without rows at `empty_since` (seconds since 1970 by the database's clock).

    False: there is a row after all, another process has the token, or a transaction runs that began before then: its
    snapshot may have to find rows there which later ones find elsewhere or not at all.
    """

    token: str
    table: str
    number: int
    empty_since: float

    def apply(self, tx: Tx) -> bool:
        if not holds_token(tx, self.token) or tx.one(_OLDER, {"since": self.empty_since}) is not None:
            return False
        name = partition(self.table, self.number)
        for statement in (LOCK_TIMEOUT, f"LOCK TABLE {self.table} IN ACCESS EXCLUSIVE MODE"):
            tx.one(text(statement), {})
        if tx.one(text(f"SELECT 1 FROM {name} LIMIT 1"), {}) is not None:
            return False
        tx.one(text(f"DROP TABLE {name}"), {})
        reach("in_drop_partition")
        return True


class PartitionKeeper:
    """Begins partitions, and drops those without rows. Used by the collector of packs, which holds the token: only a
    store that can have archives loses whole days. `clock` gives seconds."""

    def __init__(self, database: Database, writer: Writer, clock: Callable[[], float]) -> None:
        self._database = database
        self._writer = writer
        self._clock = clock
        self._looked_at: float | None = None
        self._empty_since: dict[str, float] = {}

    async def round(self, token: str) -> None:
        """Look at all tables, at most every `LOOK_S` seconds. A table in use is left for the next round. Raises
        StoreUnavailable, StoreFull."""
        if self._database.is_sqlite or (self._looked_at is not None and self._clock() - self._looked_at < LOOK_S):
            return
        self._looked_at = self._clock()
        for table in TABLES:
            try:
                await self._look_at(token, table)
            except StoreUnavailable as error:
                log.info("the partitions of %s are left for the next round: %s", table, error)

    async def _look_at(self, token: str, table: str) -> None:
        found = await self._database.read(partial(parts_of, table=table))
        *old, newest = found.numbers
        for number in old:
            name = partition(table, number)
            if await self._has_rows(token, table, number, newest):
                self._empty_since.pop(name, None)
                continue
            if name not in self._empty_since:  # after that look: a transaction that began before it may find rows
                self._empty_since[name] = await self._database.read(clock)
            if await self._writer.submit(DropPartition(token, table, number, self._empty_since[name])):
                del self._empty_since[name]
                log.info("partition %s was dropped", name)
                found = msgspec.structs.replace(found, numbers=tuple(one for one in found.numbers if one != number))
        if found.today > newest and len(found.numbers) < MOST and await self._some(table, newest, 1):
            await self._writer.submit(BeginPartition(token, table, found.today))
            log.info("partition %s was begun", partition(table, found.today))

    async def _has_rows(self, token: str, table: str, number: int, newest: int) -> bool:
        """Has it rows, after those were moved if they are few?"""
        if not await self._some(table, number, 1):
            return False
        if not await self._database.read(partial(is_nearly_empty, table=table, number=number)):
            return True
        while found := await self._some(table, number, STEP):
            for session_id in found:
                if not await self._writer.submit(MoveRows(token, session_id, table, number, newest)):
                    return True
        return True

    async def _some(self, table: str, number: int, limit: int) -> list[str]:
        return await self._database.read(partial(sessions_in, table=table, number=number, limit=limit))


_NAMES = text(
    "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = CAST(CAST(:table AS text) AS regclass)"
)
_SESSIONS = "SELECT DISTINCT session_id FROM {name} ORDER BY session_id LIMIT :most"
_MOVE = {
    name: text(
        f"UPDATE {name} SET {PART} = CAST(:new AS bigint) WHERE session_id = :sid AND {PART} = CAST(:old AS bigint)"
    )
    for name in TABLES
}
_OLDER = text(
    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND xact_start <= to_timestamp(CAST(:since AS double precision)) LIMIT 1"
)


def _begin(table: Table, number: int) -> list[TextClause]:
    """The new partition is made whole before the table is locked.

    Its columns of content have no statistics, as in revision 0014.
    """
    name = partition(table.name, number)
    keys = ", ".join(column.name for column in table.primary_key.columns)
    content = [column.name for column in table.columns if isinstance(column.type, Content)]
    statements = [
        f"CREATE TABLE {name} (LIKE {table.name} INCLUDING DEFAULTS INCLUDING STORAGE)",
        f"ALTER TABLE {name} ADD CONSTRAINT pk_{name} PRIMARY KEY ({keys})",
        *(f"ALTER TABLE {name} ALTER COLUMN {column} SET STATISTICS 0" for column in content),
        LOCK_TIMEOUT,
        f"ALTER TABLE {table.name} ATTACH PARTITION {name} FOR VALUES IN ({number})",
        f"ALTER TABLE {table.name} ALTER COLUMN {PART} SET DEFAULT {number}",
    ]
    return [text(statement) for statement in statements]
