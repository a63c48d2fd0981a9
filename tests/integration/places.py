"""Where a server under test keeps its sessions: an SQLite file in a folder, or a database of its own on PostgreSQL."""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import pytest
from helpers.databases import Postgres, SqliteTemplate
from helpers.looking import value

from app.crash_points import CrashPoint

DATABASES = ("sqlite", "postgresql")


def in_turn(points: Sequence[CrashPoint]) -> pytest.MarkDecorator:
    """Each point on one of the databases, whatever `--store` says; the simulation cuts what they are of off at any
    await, on both."""
    kinds = zip(cycle(DATABASES), points, strict=False)
    return pytest.mark.parametrize(("places", "point"), list(kinds), indirect=["places"])


@functools.cache
def _template() -> SqliteTemplate:
    """One migration for all servers: a process for each would take a second."""
    folder = tempfile.mkdtemp(prefix="turnlog-template-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return SqliteTemplate(Path(folder))


@dataclass(frozen=True)
class Place:
    """A folder for a server's file and log; with `postgres`, its sessions are kept there instead."""

    folder: Path
    postgres: Postgres | None = None

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a migrated one. On PostgreSQL it is new and dropped at the end; a file that is there is taken."""
        if self.postgres is not None:
            with self.postgres.database() as url:
                yield url
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "turnlog.db"
        if not file.exists():
            _template().copy(file)
        yield f"sqlite+aiosqlite:///{file}"


@dataclass(frozen=True)
class Places:
    """New places, all of one kind."""

    folders: pytest.TempPathFactory
    postgres: Postgres | None = None

    def empty_bytes(self) -> int:
        """What a database has before there is anything in it, as `TURNLOG_MAX_DB_BYTES` counts."""
        if self.postgres is None:
            return 0
        return int(value(self.postgres.url("postgres"), "SELECT pg_database_size('migrated')"))

    def new(self, name: str) -> Place:
        return Place(self.folders.mktemp(name), self.postgres)
