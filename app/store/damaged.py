"""Reads around damaged pages: the sessions that can be read, and why the others cannot.

Far slower than an ordinary read; used only after one that met a damaged page (`Database.read`, `on_damage`). Exports,
the training feed and the janitor step over what is damaged; lists do not, and say so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, select
from sqlalchemy.exc import DBAPIError

from app.store.broken import BrokenRow, damage
from app.store.schema import events, sessions, turns

T = TypeVar("T")
D = TypeVar("D")

AT_ONCE = 64
"""Sessions read together before their part is halved."""

PAGE = 512
"""Ids read together."""

LISTED: Sequence[Table] = (sessions, events, turns)
"""A session whose page is lost in one of these tables is usually named by another."""


class PageDamaged(Exception):
    """The data is on a damaged page; the connection stays usable."""


def attempt(connection: Connection, read: Callable[[Connection], T]) -> T:
    """Raises PageDamaged. An error ends a PostgreSQL transaction, so the read runs in a savepoint."""
    try:
        if connection.dialect.name != "postgresql":
            return read(connection)
        with connection.begin_nested():
            return read(connection)
    except (DBAPIError, BrokenRow) as error:
        why = damage(error)
        if why is None:
            raise
        raise PageDamaged(f"the database answered {why}") from error


def attempt_or(connection: Connection, read: Callable[[Connection], T], default: D) -> T | D:
    """`default` where the data is on a damaged page."""
    try:
        return attempt(connection, read)
    except PageDamaged:
        return default


def split(
    connection: Connection, ids: Sequence[str], read: Callable[[Connection, Sequence[str]], Mapping[str, T]]
) -> tuple[dict[str, T], dict[str, str]]:
    """What `read` gives of sessions (or groups), and the reason for each that cannot be read."""
    readable: dict[str, T] = {}
    lost: dict[str, str] = {}
    parts = [ids[at : at + AT_ONCE] for at in range(0, len(ids), AT_ONCE)]
    while parts:
        part = parts.pop()
        try:
            readable |= attempt(connection, lambda again: read(again, part))  # noqa: B023
        except PageDamaged as error:
            if len(part) == 1:
                lost[part[0]] = str(error)
            else:
                middle = len(part) // 2
                parts += [part[:middle], part[middle:]]
    return readable, lost


def of_readable(connection: Connection, read: Callable[[Connection, Sequence[str]], Sequence[T]]) -> list[T]:
    """What `read` gives of all sessions that can be read, a few at a time, in no order."""
    rows, _ = split(connection, session_ids(connection), lambda again, ids: {ids[0]: read(again, ids)})
    return list(chain.from_iterable(rows.values()))


def session_ids(connection: Connection, tables: Sequence[Table] = LISTED) -> list[str]:
    """Every session that a readable page of these tables or of their keys still names."""
    known: set[str] = set()
    holes: list[Table] = []
    for table in tables:
        ids, is_whole = _walked(connection, table, ())
        known |= ids
        if not is_whole:
            holes.append(table)
    # Reading goes on behind a hole at the next id that another table names.
    for table in holes:
        known |= _walked(connection, table, sorted(known))[0]
    return sorted(known)


def _walked(connection: Connection, table: Table, known: Sequence[str]) -> tuple[set[str], bool]:
    """A table's sessions by its key, a damaged page skipped up to the next of `known`; was all of it readable?"""
    column = table.c.session_id
    ids: set[str] = set()
    is_whole = True
    where, after, limit = column > "", "", PAGE
    while True:
        query = select(column).where(where).distinct().order_by(column).limit(limit)
        page: Sequence[Any] | None = attempt_or(connection, lambda again: again.execute(query).scalars().all(), None)  # noqa: B023
        if page is not None and not _is_sound(connection, after, page):
            page = None
        if page is not None:
            ids.update(page)
            if len(page) < limit:
                return ids, is_whole
            after, limit = page[-1], min(PAGE, limit * 8)
            where = column > after
        elif limit > 1:
            limit = max(1, limit // 8)
        else:
            is_whole = False
            at = bisect_right(known, after)
            if at == len(known):
                return ids, is_whole
            after = known[at]
            where = column >= after


def _is_sound(connection: Connection, after: str, page: Sequence[Any]) -> bool:
    """Of changed bytes SQLite gives a blob as an id, or a key smaller than those before it: a walk would never end."""
    if not all(isinstance(session_id, str) for session_id in page):
        return False
    if not page or connection.dialect.name != "sqlite":  # PostgreSQL orders by its own collation
        return True
    return page[0] >= after and all(before < session_id for before, session_id in pairwise(page))


def rows_in_parts(
    connection: Connection, low: int, high: int, read: Callable[[Connection, int, int], Sequence[T]]
) -> tuple[list[T], list[int]]:
    """The rows numbered `low` to `high`, and the unreadable numbers. `read` takes the first and last number."""
    rows: list[T] = []
    lost: list[int] = []
    waiting = [(low, high)] if low <= high else []
    while waiting:
        first, last = waiting.pop()
        try:
            rows += attempt(connection, partial(read, first=first, last=last))  # type: ignore[call-arg]
        except PageDamaged:
            if first == last:
                lost.append(first)
            else:
                middle = (first + last) // 2
                waiting += [(first, middle), (middle + 1, last)]
    return rows, sorted(lost)
