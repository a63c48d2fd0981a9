"""Somebody else's transaction on the store: a backup tool, a shell, an operator who went to lunch."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

import asyncpg
from helpers.clusters import LoopThread
from sqlalchemy.engine import make_url


@contextlib.contextmanager
def file_locked(url: str) -> Iterator[None]:
    """SQLite's one lock for writers is held meanwhile."""
    foreign = sqlite3.connect(make_url(url).database or "", isolation_level=None, timeout=30)
    foreign.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        foreign.execute("ROLLBACK")
        foreign.close()


@contextlib.contextmanager
def locked(url: str, statement: str) -> Iterator[None]:
    """What a statement locks on PostgreSQL is held meanwhile."""
    thread = LoopThread()
    foreign = thread.run(asyncpg.connect(url.replace("+asyncpg", "")))
    try:
        thread.run(foreign.execute(f"BEGIN; {statement}"))
        yield
    finally:
        thread.run(foreign.close())
        thread.close()
