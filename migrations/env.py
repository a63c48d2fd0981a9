"""Alembic's environment. It uses the application's database URL and, on SQLite, the application's lock."""

from __future__ import annotations

import asyncio
import os
import sys

from alembic import context
from sqlalchemy import Connection, select
from sqlalchemy.exc import DBAPIError

from app.composition import metadata
from app.errors import StartupError, StoreFull
from app.settings import load_settings
from app.store.database import create_engine, revision_without_room, sqlite_lock
from app.store.dialect import change_schema, store_error
from app.store.opening import (
    Held,
    change_revision,
    note_release,
    release_of,
    require_known,
    revision_head,
    revision_of,
    unopened,
)
from app.store.postgres import DRIVER_ERRORS, require_usable

PRIVATE = 0o077
"""The umask, so that other users cannot read an SQLite file, which holds prompts and replies. Its WAL gets the same
mode."""


def _migrate(connection: Connection) -> None:
    """Run the migrations. Raises StartupError if this version does not know the database's revision, or a process
    serves it at another one."""
    found, wanted = revision_of(connection), _wanted()
    require_known(found, release_of(connection))
    if found and wanted not in (None, found) and connection.dialect.name == "postgresql":
        change_revision(connection, load_settings("lease_s").lease_s)
    context.configure(
        connection=connection, target_metadata=metadata(), transaction_per_migration=True, include_object=_is_in_code
    )
    with context.begin_transaction():
        context.run_migrations()
    if wanted == revision_head() != found:
        note_release(connection)


def _wanted() -> str | tuple[str, ...] | None:
    """The revision to get to; None where the command migrates nothing."""
    try:
        wanted = context.get_revision_argument()
    except KeyError:
        return None
    return wanted[0] if isinstance(wanted, tuple) and len(wanted) == 1 else wanted  # `alembic upgrade heads`


def _is_in_code(_item: object, name: str | None, kind: str, reflected: bool, _compared: object) -> bool:
    """Does the schema in code have such an item? It knows nothing of the search's, which makes its own."""
    return not reflected or not (name or "").startswith("search_")


async def _online(url: str) -> None:
    engine = create_engine(url, answer_s=None)
    is_postgres = engine.dialect.name == "postgresql"
    try:
        async with engine.begin() as connection:
            if is_postgres:
                await require_usable(connection)
            # Two that migrate an empty database at once would both create the first table.
            await connection.execute(select(change_schema()))
            await connection.run_sync(_migrate)
    except (DBAPIError, OSError, *DRIVER_ERRORS) as error:
        if is_postgres or not isinstance(store_error(error), StoreFull):
            raise unopened(url, error) from error
        await _on_a_full_disk(url)
    finally:
        await engine.dispose()


async def _on_a_full_disk(url: str) -> None:
    """Succeed on a full disk if no migration is needed, so that the server can start and report the problem.

    Raises StartupError otherwise.
    """
    found = await revision_without_room(url)
    if found is None or found != _wanted():
        raise StartupError(f"the disk is full: free disk space, then run this again (revision {found or 'unknown'})")
    print(f"turnlog: the disk is full; the schema is at revision {found} already", file=sys.stderr)


def run() -> None:
    try:
        _run(context.config.get_main_option("sqlalchemy.url") or load_settings().database_url)
    except StartupError as error:
        sys.exit(error.under("turnlog"))


def _run(url: str) -> None:
    """Run the migrations with the SQLite lock held. Raises StartupError."""
    lock = sqlite_lock(url, create=True)
    if lock is not None:
        try:
            lock.acquire()
        except Held as held:
            raise StartupError(
                f"a server is running on this database, {held}: stop it before changing its schema"
            ) from None
        except OSError as error:
            raise unopened(url, error) from error
    before = os.umask(PRIVATE)
    try:
        asyncio.run(_online(url))
    finally:
        os.umask(before)
        if lock is not None:
            lock.release()


run()
