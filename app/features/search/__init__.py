"""Search over all messages: a follower of the log, and an index of its own. The rest is loaded where it is on.

`GET /search`. An erasure has the index forget the session (`Erasure.forget`). Nothing of it touches a turn.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from sqlalchemy import text as sql

from app.errors import AppError
from app.metrics import Family

if TYPE_CHECKING:
    from app.api.routes import Route
    from app.features.search.index import Index
    from app.features.search.routes import Search
    from app.services import Services
    from app.store.database import Database

log = logging.getLogger("turnlog.search")

METRICS = (
    Family("turnlog_search_failures_total", "counter", "Steps of the search index that failed."),
    Family("turnlog_search_behind_events", "largest", "Events that the search index lacks."),
)


def entries() -> list[Route]:
    from app.features.search.routes import route

    return route.entries


async def absent(services: Services) -> None:
    """Remove an index that was made while the search was on: no erasure would clean it."""
    try:
        await _discard_index(services.database)
    except (AppError, OSError) as error:
        log.warning("the index of the search, which is off, could not be removed: %s", error)


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


async def _discard_index(database: Database) -> None:
    """Raises StoreUnavailable."""
    from app.features.search.index import TABLES, index_file, remove_file

    if database.is_sqlite:
        if remove_file(index_file(database)):
            log.warning("search is off: its index has been removed")
        return
    look = sql("SELECT to_regclass('search_messages') IS NOT NULL")
    if await database.read(lambda connection: connection.execute(look).scalar_one()):
        drop = sql(f"DROP TABLE IF EXISTS {', '.join(TABLES)}")
        await database.write(lambda tx: tx.one(drop, {}), durable=True)
