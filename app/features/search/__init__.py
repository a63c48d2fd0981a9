"""Search over all messages: a follower of the log, and an index of its own. The rest is loaded where it is on.

`GET /search`. An erasure has the index forget the session (`Erasure.forget`). Nothing of it touches a turn.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import text

from app.errors import AppError
from app.metrics import Family
from app.store.sqlite_engine import file_of

if TYPE_CHECKING:
    from app.api.routes import Route
    from app.features.search.index import Index
    from app.features.search.routes import Search
    from app.services import Services
    from app.store.engine import Database

log = logging.getLogger("turnlog.search")

METRICS = (
    Family("turnlog_search_failures_total", "counter", "Steps of the search index that failed."),
    Family("turnlog_search_behind_events", "largest", "Events that the search index lacks."),
)

TABLES = ("search_messages", "search_state")
"""PostgreSQL's; the index makes them, no migration does."""


def entries() -> list[Route]:
    from app.features.search.routes import route

    return route.entries


async def absent(services: Services) -> None:
    """Remove an index that was made while the search was on: no erasure would clean it."""
    try:
        await _discard_index(services.database)
    except (AppError, OSError) as error:
        log.warning("a search index that nobody keeps up cannot be removed: %s", error)


def add_to(app: Services) -> Search:
    from app.features.search.follower import Follower
    from app.features.search.routes import Search

    index = _index(app)
    follower = Follower(app.database, app.log_end, app.all_events, index, app.metrics)
    app.erasure.forget.append(index.forget)

    async def open_index() -> None:
        with contextlib.suppress(AppError):  # the follower tries again
            await index.open()

    app.opens.append(open_index)
    app.starts.append(follower.start)
    app.ends.append(follower.stop)
    return Search(app, index)


def _index(app: Services) -> Index:
    if app.database.is_sqlite:
        from app.features.search.index import SqliteIndex

        return SqliteIndex(app.database)
    from app.features.search.postgres import PostgresIndex

    return PostgresIndex(app.database, app.writer, app.registration.incarnation, app.settings.lease_s)


def index_file(database: Database) -> Path:
    """SQLite's index lies beside the database."""
    return Path(f"{file_of(database.url)}.search")


def remove_file(file: Path) -> bool:
    """Remove an SQLite index with its log; was there one?"""
    was_there = file.exists()
    for path in (file, *(file.with_name(f"{file.name}-{suffix}") for suffix in ("wal", "shm"))):
        path.unlink(missing_ok=True)
    return was_there


async def _discard_index(database: Database) -> None:
    """Raises StoreUnavailable."""
    if database.is_sqlite:
        if remove_file(index_file(database)):
            log.warning("the search is off: its index has been removed")
        return
    look = text("SELECT to_regclass('search_messages') IS NOT NULL")
    if await database.read(lambda connection: connection.execute(look).scalar_one()):
        drop = text(f"DROP TABLE IF EXISTS {', '.join(TABLES)}")
        await database.write(lambda tx: tx.one(drop, {}), durable=True)
