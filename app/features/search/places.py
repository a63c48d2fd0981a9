"""Where the index is: a file beside an SQLite database, tables of PostgreSQL. Known also where the search is off, to
remove what was made while it was on."""

from __future__ import annotations

from pathlib import Path

from app.store.engine import Database
from app.store.sqlite_engine import file_of

TABLES = ("search_messages", "search_state")
"""PostgreSQL's; the index makes them, no migration does."""


def index_file(database: Database) -> Path:
    """SQLite's index lies beside the database."""
    return Path(f"{file_of(database.url)}.search")


def remove_file(file: Path) -> bool:
    """Remove an SQLite index with its log; was there one?"""
    was_there = file.exists()
    for path in (file, *(file.with_name(f"{file.name}-{suffix}") for suffix in ("wal", "shm"))):
        path.unlink(missing_ok=True)
    return was_there
