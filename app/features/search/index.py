"""The index on SQLite: a file of its own beside the database, with words in FTS5 tables. Deleting it makes it anew.

There is a full-text table, a shard, for each SHARD messages. FTS5 keeps a deleted word in its file until it merges what
it has written, and merging a shard takes a known time, however large the index is. (FTS5's `secure-delete` is in SQLite
3.42 and later only.)

https://www.sqlite.org/fts5.html#external_content_tables
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from app.errors import StoreUnavailable
from app.features.search.text import Query
from app.process import uncancelled
from app.store.database import Database
from app.store.opening import file_of
from app.store.sessions import load_heads

T = TypeVar("T")

SHARD = 20_000

LOCKED_MS = 5000

FIRST = (1 << 63) - 1
"""`before` of a search that begins."""

_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA secure_delete = ON;
CREATE TABLE IF NOT EXISTS state (only INTEGER PRIMARY KEY CHECK (only = 1), position TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS messages (
    id INTEGER PRIMARY KEY, session_id TEXT NOT NULL, turn INTEGER NOT NULL, message INTEGER NOT NULL, at REAL NOT NULL,
    role TEXT NOT NULL, tools TEXT NOT NULL, finish_reason TEXT, text TEXT NOT NULL, live INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX IF NOT EXISTS messages_of_session ON messages (session_id);
"""

TABLES = ("search_messages", "search_state")
"""PostgreSQL's; the index makes them, no migration does."""

COLUMNS = "id, session_id, turn, message, at, role, tools, finish_reason, text"


class Message(msgspec.Struct, frozen=True):
    """A message at its place in the conversation that ends with the turn's reply. `tools`: names, each between line
    feeds; `finish_reason` of a reply; `at`: when the turn was committed. `id` orders messages, 0: it has none yet."""

    id: int
    session_id: str
    turn: int
    message: int
    at: float
    role: str
    tools: str
    finish_reason: str | None
    text: str


class Page(msgspec.Struct):
    """What a page of the log changes, and the position behind it. `live`: the turns that restored sessions have now."""

    position: str = ""
    messages: list[Message] = []
    live: dict[str, set[int]] = {}
    erased: set[str] = set()


class Wanted(msgspec.Struct, frozen=True):
    """Which messages, from the newest with an id below `before` on; None: any."""

    query: Query | None
    role: str | None
    tool: str | None
    finish_reason: str | None
    session_ids: Sequence[str] | None
    before: int
    limit: int


def index_file(database: Database) -> Path:
    """SQLite's index lies beside the database."""
    return Path(f"{file_of(database.url)}.search")


def remove_file(file: Path) -> bool:
    """Remove an SQLite index with its log; was there one?"""
    was_there = file.exists()
    for path in (file, *(file.with_name(f"{file.name}-{suffix}") for suffix in ("wal", "shm"))):
        path.unlink(missing_ok=True)
    return was_there


class Index(Protocol):
    """Every method raises StoreUnavailable."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def take_lease(self) -> int | None:
        """The fence under which this process may write for a while; None: another one does."""

    async def clear(self) -> None:
        """Forget everything, and the position too."""

    async def position(self) -> str | None:
        """How far in the log of all sessions the index is; None: nowhere."""

    async def write(self, page: Page, fence: int) -> None:
        """Nothing is written of a session that the store says is erased: it may be since its content was read."""

    async def forget(self, session_id: str) -> None:
        """Delete a session's words from the disk."""

    async def find(self, wanted: Wanted) -> Sequence[Message]: ...


class SqliteIndex:
    """One connection, used by one task at a time, on threads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._file = index_file(database)
        self._lock = asyncio.Lock()
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        await self._do(lambda connection: None)

    async def close(self) -> None:
        async with self._lock:
            self._close()

    async def take_lease(self) -> int | None:
        return 0  # the lock of the database's file admits one process

    async def clear(self) -> None:
        async with self._lock:
            self._close()
            await asyncio.to_thread(remove_file, self._file)

    async def position(self) -> str | None:
        row = await self._do(lambda connection: connection.execute("SELECT position FROM state").fetchone())
        return None if row is None else str(row[0])

    async def write(self, page: Page, fence: int) -> None:
        async with self._lock:  # an erasure that the store has not yet told of waits here, and then finds the words
            ids = sorted({message.session_id for message in page.messages})
            heads = await self._database.read(lambda connection: load_heads(connection, ids))
            living = {head.session_id for head in heads if head.status != "erased"}
            await self._run(partial(_write, page=page, living=living))
            if page.erased:
                await self._run(_truncate)

    async def forget(self, session_id: str) -> None:
        async with self._lock:
            await self._run(partial(_forget, session_id=session_id))
            await self._run(_truncate)

    async def find(self, wanted: Wanted) -> Sequence[Message]:
        return await self._do(partial(_find, wanted=wanted))

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        async with self._lock:
            return await self._run(work)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return await uncancelled(asyncio.to_thread(self._on_thread, work))
        except (sqlite3.Error, OSError) as error:
            if (getattr(error, "sqlite_errorcode", 0) & 0xFF) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                self._close()
                remove_file(self._file)  # it is made anew
            raise StoreUnavailable(f"the search index {self._file.name}: {error}") from error

    def _on_thread(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._connection is None:
            self._file.touch(mode=0o600)
            connection = sqlite3.connect(
                self._file, timeout=LOCKED_MS / 1000, isolation_level=None, check_same_thread=False
            )
            connection.executescript(_SCHEMA)
            self._connection = connection
        if work is _truncate:
            return work(self._connection)
        with self._connection as connection:
            connection.execute("BEGIN")
            return work(connection)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _write(connection: sqlite3.Connection, page: Page, living: Collection[str]) -> None:
    (newest,) = connection.execute("SELECT coalesce(max(id), 0) FROM messages").fetchone()
    wanted = (message for message in page.messages if message.session_id in living)
    rows = [(number, *msgspec.structs.astuple(message)[1:]) for number, message in enumerate(wanted, newest + 1)]
    connection.executemany(f"INSERT INTO messages ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    for shard in {row[0] // SHARD for row in rows}:
        connection.execute(
            f"CREATE VIRTUAL TABLE IF NOT EXISTS words_{shard} USING fts5("
            "text, content='messages', content_rowid='id', tokenize='unicode61 remove_diacritics 0')"
        )
        connection.executemany(
            f"INSERT INTO words_{shard} (rowid, text) VALUES (?, ?)",
            [(row[0], row[-1]) for row in rows if row[0] // SHARD == shard],
        )
    connection.executemany(
        "UPDATE messages SET live = turn IN (SELECT value FROM json_each(?)) WHERE session_id = ?",
        [(msgspec.json.encode(sorted(turns)).decode(), session_id) for session_id, turns in page.live.items()],
    )
    for session_id in page.erased:
        _forget(connection, session_id)
    connection.execute("INSERT OR REPLACE INTO state (only, position) VALUES (1, ?)", (page.position,))


def _forget(connection: sqlite3.Connection, session_id: str) -> None:
    rows = connection.execute("SELECT id, text FROM messages WHERE session_id = ?", (session_id,)).fetchall()
    shards = {row[0] // SHARD for row in rows}
    for number, text in rows:
        shard = number // SHARD
        connection.execute(
            f"INSERT INTO words_{shard} (words_{shard}, rowid, text) VALUES ('delete', ?, ?)", (number, text)
        )
    for shard in shards:  # in this transaction: after a crash there would be no row that tells of the words
        connection.execute(f"INSERT INTO words_{shard} (words_{shard}) VALUES ('optimize')")
    connection.execute("DELETE FROM messages WHERE session_id = ?", (session_id,))


def _truncate(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _find(connection: sqlite3.Connection, wanted: Wanted) -> list[Message]:
    columns = ", ".join(f"messages.{name}" for name in COLUMNS.split(", "))
    conditions = ["live", "messages.id < :before"]
    given: dict[str, object] = {"before": wanted.before, "role": wanted.role, "finish_reason": wanted.finish_reason}
    conditions += [f"{name} = :{name}" for name in ("role", "finish_reason") if given[name] is not None]
    if wanted.tool is not None:
        conditions.append("instr(tools, char(10) || :tool || char(10)) > 0")
        given["tool"] = wanted.tool
    (newest,) = connection.execute("SELECT coalesce(max(id), -1) FROM messages").fetchone()
    shards: Sequence[int] = range(min(wanted.before, newest) // SHARD, -1, -1)
    if wanted.session_ids is not None:
        conditions.append("session_id IN (SELECT value FROM json_each(:sessions))")
        given["sessions"] = msgspec.json.encode(wanted.session_ids).decode()
        own = (
            f"SELECT DISTINCT id / {SHARD} AS shard FROM messages WHERE {' AND '.join(conditions)} ORDER BY shard DESC"
        )
        shards = [row[0] for row in connection.execute(own, given)]
    where = " AND ".join(conditions)
    if wanted.query is None:
        first = f"SELECT {columns} FROM messages WHERE {where} ORDER BY id DESC LIMIT :limit"
        return [Message(*row) for row in connection.execute(first, {**given, "limit": wanted.limit})]
    messages: list[Message] = []
    given["match"] = _match(wanted.query)
    for shard in shards:
        matches = (
            f"SELECT {columns} FROM words_{shard} CROSS JOIN messages ON messages.id = words_{shard}.rowid "
            f"WHERE words_{shard} MATCH :match AND words_{shard}.rowid < :before AND {where} "
            f"ORDER BY words_{shard}.rowid DESC LIMIT :limit"
        )
        rows = connection.execute(matches, {**given, "limit": wanted.limit - len(messages)})
        messages += [Message(*row) for row in rows]
        if len(messages) >= wanted.limit:
            break
    return messages


def _match(query: Query) -> str:
    """In FTS5's language. Quotes hold a term: it has letters, digits and spaces."""
    needed = (" OR ".join(f'"{term}"' for term in alternatives) for alternatives in query.needed)
    whole = " AND ".join(f"({part})" for part in needed)
    excluded = " OR ".join(f'"{term}"' for term in query.excluded)
    return f"({whole}) NOT ({excluded})" if excluded else whole
