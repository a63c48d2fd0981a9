"""Searches the index, from the newest entry on."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, exists, select, text

from app.domain import notes
from app.domain.search_query import Query
from app.store.dialect import contains
from app.store.heads_view import HeadFilter, filtered
from app.store.schema import search_entries, search_metadata, search_shards, sessions
from app.store.search import words
from app.store.search.writing import SET_ASIDE


class EntryFilter(msgspec.Struct, frozen=True):
    """Conditions on entries; None: any. `pair` is in the session's metadata, as `key=value`."""

    role: str | None = None
    tool: str | None = None
    finish_reason: str | None = None
    reason: str | None = None
    session_id: str | None = None
    pair: str | None = None


class Found(msgspec.Struct, frozen=True):
    """An entry, and its session's row."""

    id: int
    session_id: str
    turn: int
    message: int | None
    role: str
    tools: str | None
    finish_reason: str | None
    reason: str | None
    at: float
    text: str
    status: str
    group_id: str | None


_entry = search_entries.c
_COLUMNS = (
    *(_entry[name] for name in Found.__struct_fields__[:-2]),
    sessions.c.status,
    sessions.c.group_id,
)


def find(
    connection: Connection, query: Query | None, wanted: EntryFilter, heads: HeadFilter, before: int, limit: int
) -> list[Found]:
    """The newest entries with an id below `before`."""
    if query is None or connection.dialect.name == "postgresql":
        matching = [] if query is None else [words.matches(query)]
        return _rows(connection, _select(wanted, heads, before).where(*matching).limit(limit))
    found: list[Found] = []
    shards = select(search_shards.c.id).order_by(search_shards.c.id.desc())
    if before <= _NEWEST:
        shards = shards.where(search_shards.c.id <= _shard_of(connection, before))
    for shard in connection.execute(shards).scalars().all():
        full_text = words.full_text_of(shard)
        part = (
            _select(wanted, heads, before, full_text.c.rowid)
            .select_from(full_text)
            .where(full_text.c.rowid == _entry.id, words.matches_in(shard, query))
        )
        found += _rows(connection, part.limit(limit - len(found)))
        if len(found) >= limit:
            break
    return found


_NEWEST = (1 << 62) - 1

FIRST = 1 << 62
"""`before` of a search that begins."""


def _shard_of(connection: Connection, before: int) -> int:
    """The shard of the last entry below `before`."""
    query = select(_entry.shard).where(_entry.id < before).order_by(_entry.id.desc()).limit(1)
    return connection.execute(query).scalar() or 0


def _select(wanted: EntryFilter, heads: HeadFilter, before: int, key: ColumnElement[int] | None = None) -> Select[Any]:
    own_id = _entry.id if key is None else key
    conditions: list[ColumnElement[bool] | None] = [
        own_id < before,
        sessions.c.session_id == _entry.session_id,
        sessions.c.status != "erased",
        None if wanted.role is None else _entry.role == wanted.role,
        None if wanted.tool is None else contains(_entry.tools, notes.marked(wanted.tool)),
        None if wanted.finish_reason is None else _entry.finish_reason == wanted.finish_reason,
        (_entry.reason.is_(None) | (_entry.reason != SET_ASIDE)) if wanted.reason is None else None,
        None if wanted.reason is None else _entry.reason == wanted.reason,
        None if wanted.session_id is None else _entry.session_id == wanted.session_id,
        None if wanted.pair is None else _has_pair(wanted.pair),
    ]
    query = select(*_COLUMNS).where(*(one for one in conditions if one is not None))
    return filtered(query, heads).order_by(own_id.desc())


def _has_pair(pair: str) -> ColumnElement[bool]:
    return exists().where(search_metadata.c.pair == pair, search_metadata.c.session_id == _entry.session_id)


def _rows(connection: Connection, query: Select[Any]) -> list[Found]:
    return [Found(*row) for row in connection.execute(query)]


def can_search(connection: Connection) -> bool:
    """Not every build of SQLite has FTS5."""
    if connection.dialect.name != "sqlite":
        return True
    return bool(connection.execute(text("SELECT sqlite_compileoption_used('ENABLE_FTS5')")).scalar())
