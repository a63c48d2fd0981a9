"""Handles damaged SQLite files in `backup` and `compact`.

It reports what cannot be read and, with `--salvage`, copies the rest.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from app.errors import StartupError
from app.store.broken import BrokenRow, damage
from app.store.damaged import PageDamaged
from app.store.dialect import FILE_PRAGMAS
from app.store.revision import revision_head
from app.store.salvage import Damage, copy_readable, find
from ops.keeping import DONE, NOT_ALL_WELL, CommandResult, sync

SHOWN = 20
"""Number of sessions named in one line."""


class DamagedStore(StartupError):
    """The store is damaged, and the command was not told to `--salvage` it."""


def refusal(path: Path, progress: Callable[[str], None], remaining_state: str) -> DamagedStore:
    """The error for a damaged store. `remaining_state` describes the state that the command leaves."""
    try:
        with _read_consistently(path) as source:
            losses = find(source, progress)
    except (PageDamaged, BrokenRow, DBAPIError, sqlite3.Error) as error:
        return DamagedStore(f"{path} is damaged and cannot be read ({error}); {remaining_state}".splitlines()[0])
    return DamagedStore(f"{path} is damaged: {describe(losses)}; {remaining_state}; --salvage copies the rest")


def describe(losses: Damage) -> str:
    """The damaged tables and sessions in one line."""
    tables = f"tables {', '.join(losses.tables)}" if losses.tables else "no known table"
    names = sorted(losses.sessions)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    sessions = f"sessions {', '.join(names[:SHOWN])}{more}" if names else "no session has lost anything"
    return f"{tables}; {sessions}"


def salvage(path: Path, target: Path, progress: Callable[[str], None]) -> Damage:
    """Copy everything readable into the empty file `target`. Raises StartupError if nothing can be read."""
    with closing(sqlite3.connect(target, isolation_level=None)) as empty:
        for pragma in (*FILE_PRAGMAS, "PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF"):
            empty.execute(pragma)
        try:
            with _read_consistently(path) as source:
                _require_revision(source)
                deferred = _schema(source, empty)
                with _sqlalchemy_connection(lambda: empty) as copy:
                    empty.execute("BEGIN")
                    losses = copy_readable(source, copy, progress)
                    empty.execute("COMMIT")
        except (PageDamaged, BrokenRow, DBAPIError) as error:
            raise StartupError(f"{path} is too damaged to copy anything: {error}".splitlines()[0]) from error
        for statement in deferred:
            empty.execute(statement)
        empty.execute("PRAGMA journal_mode = WAL").fetchone()
    sync(target)
    return losses


def outcome(line: str, fields: dict[str, Any], losses: Damage | None) -> CommandResult:
    """The result of a command that copied a store. `losses`: the content that could not be copied."""
    if not losses:
        return CommandResult(DONE, [line], fields)
    tables = [f"table {name}: rows are missing" for name in losses.tables]
    sessions = [f"session {name}: incomplete, of {', '.join(lost)}" for name, lost in sorted(losses.sessions.items())]
    missing = {"tables": losses.tables, "sessions": losses.sessions}
    return CommandResult(NOT_ALL_WELL, [*tables, *sessions, line], {**fields, "missing": missing})


def is_damage(error: BaseException) -> bool:
    return damage(error) is not None


@contextmanager
def _read_consistently(path: Path) -> Iterator[Connection]:
    """Read a consistent state of a store that others may write to."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, isolation_level=None)) as raw:
        raw.execute("BEGIN")
        with _sqlalchemy_connection(lambda: raw) as connection:
            yield connection


@contextmanager
def _sqlalchemy_connection(creator: Callable[[], sqlite3.Connection]) -> Iterator[Connection]:
    """A SQLAlchemy connection over a driver connection, whose transactions the caller controls."""
    engine = create_engine("sqlite://", creator=creator, poolclass=StaticPool, pool_reset_on_return=None)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        yield connection


def _require_revision(source: Connection) -> None:
    """Raises StartupError if the store has another revision than this version, since its tables may have other
    columns."""
    revision = source.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    if revision != revision_head():
        raise StartupError(
            f"the store is at revision {revision}, this version salvages {revision_head()}: use the store's own version"
        )


def _schema(source: Connection, empty: sqlite3.Connection) -> list[str]:
    """Create the tables in `empty`; returns the statements to run after they are filled, such as indexes."""
    deferred: list[str] = []
    for kind, statement in source.exec_driver_sql("SELECT type, sql FROM sqlite_master WHERE sql IS NOT NULL").all():
        if kind == "table":
            empty.execute(statement)
        else:
            deferred.append(statement)
    revision = source.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    empty.execute("INSERT INTO alembic_version VALUES (?)", (revision,))
    return deferred
