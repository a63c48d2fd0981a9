"""Searches the index, from the newest entry on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, exists, func, select, text

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


FEW_SESSIONS, FEW_ENTRIES = 1_000, 20_000
"""A search in at most so many sessions, which have at most so many entries, reads these entries."""

NEWEST_ENTRIES = 4_000
"""PostgreSQL looks through so many of the newest entries for frequent words, before it asks its index."""


def find(
    connection: Connection, query: Query | None, wanted: EntryFilter, heads: HeadFilter, before: int, limit: int
) -> list[Found]:
    """The newest entries with an id below `before`."""
    few = _few_sessions(connection, wanted, heads)
    if few == []:
        return []
    given = {"role": wanted.role, "tools": wanted.tool, "finish_reason": wanted.finish_reason}
    asked = words.Wanted(query, {field: value for field, value in given.items() if value is not None})
    base = _select(wanted, heads).where(*([] if few is None else [_entry.session_id.in_(few)]))
    if connection.dialect.name == "postgresql":
        return _on_postgresql(connection, base, asked, before, limit, is_of_few=few is not None)
    match = asked.in_fts5
    if match is None or (query is None and few is not None):
        return _newest(connection, base.where(_entry.id < before), limit, by_id=few is None)
    return _in_shards(connection, base, match, few, before, limit)


def _few_sessions(connection: Connection, wanted: EntryFilter, heads: HeadFilter) -> list[str] | None:
    """The sessions in which to search; None if they are many, or any."""
    if wanted.session_id is None and wanted.pair is None and heads == HeadFilter():
        return None
    query = filtered(select(sessions.c.session_id).where(sessions.c.status != "erased"), heads)
    if wanted.session_id is not None:
        query = query.where(sessions.c.session_id == wanted.session_id)
    if wanted.pair is not None:
        query = query.where(
            search_metadata.c.pair == wanted.pair, search_metadata.c.session_id == sessions.c.session_id
        )
    found = list(connection.execute(query.limit(FEW_SESSIONS + 1)).scalars())
    if len(found) > FEW_SESSIONS:
        return None
    entries = select(_entry.id).where(_entry.session_id.in_(found)).limit(FEW_ENTRIES + 1).subquery()
    counted: int = connection.execute(select(func.count()).select_from(entries)).scalar_one()
    return None if counted > FEW_ENTRIES else found


def _newest(connection: Connection, query: Select[Any], limit: int, *, by_id: bool) -> list[Found]:
    """`by_id`: walk from the newest entry on until there are enough. Else find all, then sort: the sum keeps the
    database from walking."""
    order = _entry.id if by_id else _entry.id + 0
    return [Found(*row) for row in connection.execute(query.order_by(order.desc()).limit(limit))]


def _on_postgresql(
    connection: Connection, base: Select[Any], asked: words.Wanted, before: int, limit: int, *, is_of_few: bool
) -> list[Found]:
    matching = asked.in_postgresql
    if is_of_few or matching is None:
        whole = base.where(_entry.id < before, *([] if matching is None else [matching]))
        return _newest(connection, whole, limit, by_id=not is_of_few)
    newest = select(func.max(_entry.id)).where(_entry.id < before)
    oldest = (connection.execute(newest).scalar() or 0) - NEWEST_ENTRIES
    part = base.where(_entry.id < before, _entry.id > oldest, matching)
    found = _newest(connection, part, limit, by_id=True)
    if len(found) == limit or oldest <= 0:
        return found
    return found + _newest(connection, base.where(_entry.id <= oldest, matching), limit - len(found), by_id=False)


def _in_shards(
    connection: Connection, base: Select[Any], match: str, few: Sequence[str] | None, before: int, limit: int
) -> list[Found]:
    """Goes through the shards from the newest on, of few sessions only through those that have their entries."""
    found: list[Found] = []
    for shard, first, last in _shards(connection, few, before):
        full_text = words.full_text_of(shard)
        own_id = full_text.c.rowid
        part = base.select_from(full_text).where(own_id == _entry.id, words.matches_in(shard, match), own_id < before)
        if few is not None:
            part = part.where(own_id >= first, own_id <= last)
        rows = connection.execute(part.order_by(own_id.desc()).limit(limit - len(found)))
        found += [Found(*row) for row in rows]
        if len(found) >= limit:
            break
    return found


def _shards(connection: Connection, few: Sequence[str] | None, before: int) -> list[tuple[int, int, int]]:
    """Shards, newest first, with the ids of the first and the last entry to look for."""
    if few is not None:
        query = (
            select(_entry.shard, func.min(_entry.id), func.max(_entry.id))
            .where(_entry.session_id.in_(few), _entry.id < before)
            .group_by(_entry.shard)
            .order_by(_entry.shard.desc())
        )
        return [(row[0], row[1], row[2]) for row in connection.execute(query)]
    shards = select(search_shards.c.id).order_by(search_shards.c.id.desc())
    if before <= _NEWEST:
        shards = shards.where(search_shards.c.id <= _shard_of(connection, before))
    return [(shard, 0, FIRST) for shard in connection.execute(shards).scalars()]


_NEWEST = (1 << 62) - 1

FIRST = 1 << 62
"""`before` of a search that begins."""


def _shard_of(connection: Connection, before: int) -> int:
    """The shard of the last entry below `before`."""
    query = select(_entry.shard).where(_entry.id < before).order_by(_entry.id.desc()).limit(1)
    return connection.execute(query).scalar() or 0


def _select(wanted: EntryFilter, heads: HeadFilter) -> Select[Any]:
    conditions: list[ColumnElement[bool] | None] = [
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
    return filtered(query, heads)


def _has_pair(pair: str) -> ColumnElement[bool]:
    return exists().where(search_metadata.c.pair == pair, search_metadata.c.session_id == _entry.session_id)


def can_search(connection: Connection) -> bool:
    """Not every build of SQLite has FTS5."""
    if connection.dialect.name != "sqlite":
        return True
    return bool(connection.execute(text("SELECT sqlite_compileoption_used('ENABLE_FTS5')")).scalar())
