"""Sessions of archives in memory: small SQLite databases, which the same statements read as the store itself.

Who reads a session's rows need not know where they are. An export in the order of commits finds the sessions of a row
group beside each other.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection, create_engine, insert
from sqlalchemy.pool import StaticPool

from app.store.archives.format import TABLES, ArchivedSession, Place
from app.store.schema import metadata, sessions

if TYPE_CHECKING:
    from app.store.packs.bucket import Bucket

T = TypeVar("T")

KEPT_BYTES = 64 << 20
"""Bytes of row groups that stay in memory; the one that was read last always does."""


class OpenArchives:
    """The row groups that are in memory. Call `close` after use."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._open: OrderedDict[Place, _RowGroup] = OrderedDict()
        self._reading: dict[Place, asyncio.Task[None]] = {}

    async def read(self, place: Place, function: Callable[[Connection], T], head: Mapping[str, Any] | None = None) -> T:
        """Run `function` on a thread, on a database that holds the sessions of a row group and `head`.

        Raises PayloadsUnavailable, CorruptContent.
        """
        async with self._in_use(place) as group, group.lock:
            return await asyncio.to_thread(group.run, function, head)

    async def close(self) -> None:
        for task in self._reading.values():
            task.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)
        self._evict(0)

    @asynccontextmanager
    async def _in_use(self, place: Place) -> AsyncIterator[_RowGroup]:
        while (group := self._open.get(place)) is None:
            await self._read(place)
        self._open.move_to_end(place)
        group.users += 1
        try:
            self._evict(KEPT_BYTES)
            yield group
        finally:
            group.users -= 1
            if self._open.get(place) is not group and not group.users:
                group.close()

    def _evict(self, most: int) -> None:
        """Forget the row groups that were read longest ago. One in use is closed by its last user."""
        size = sum(group.size for group in self._open.values())
        while self._open and size > most and (len(self._open) > 1 or not most):
            _, group = self._open.popitem(last=False)
            size -= group.size
            if not group.users:
                group.close()

    async def _read(self, place: Place) -> None:
        """Those who ask meanwhile wait for the same."""
        task = self._reading.get(place)
        if task is None:
            task = self._reading[place] = asyncio.create_task(self._load(place))
            task.add_done_callback(lambda _: self._reading.pop(place, None))
        await asyncio.shield(task)

    async def _load(self, place: Place) -> None:
        from app.store.archives.reader import read_group

        self._open[place] = await asyncio.to_thread(_RowGroup, await read_group(self._bucket, place))


class _RowGroup:
    """A row group as an SQLite database in memory, of `size` bytes. One thread at a time, under `lock`."""

    def __init__(self, found: Mapping[str, ArchivedSession]) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
        self._engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
        metadata.create_all(self._engine)
        with self._engine.begin() as connection:
            for table in TABLES:
                rows = [
                    {**row, "session_id": one} for one, session in found.items() for row in session.rows[table.name]
                ]
                if rows:
                    connection.execute(insert(table), rows)
            raw = connection.connection.driver_connection
            assert isinstance(raw, sqlite3.Connection)
            (pages,), (page_bytes,) = (raw.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
        self.size = int(pages) * int(page_bytes)

    def run(self, function: Callable[[Connection], T], head: Mapping[str, Any] | None) -> T:
        """The head is rolled back afterwards: it may be another when the group is read again."""
        with self._engine.connect() as connection:
            if head is not None:
                connection.execute(insert(sessions), [head])
            return function(connection)

    def close(self) -> None:
        self._engine.dispose()
