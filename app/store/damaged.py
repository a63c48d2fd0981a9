"""Reads around damaged pages: the sessions that can be read, and why the others cannot.

Far slower than an ordinary read; used only after one that met a damaged page (`Database.read`, `or_else`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from sqlalchemy import Connection, Select, Table, select
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
"""A session whose page is lost in one of these tables is usually found in another."""


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
    """The result of `read` for each session, and the reason for each that cannot be read."""
    found: dict[str, T] = {}
    lost: dict[str, str] = {}
    parts = [ids[at : at + AT_ONCE] for at in range(0, len(ids), AT_ONCE)]
    while parts:
        part = parts.pop()
        try:
            found |= attempt(connection, lambda again: read(again, part))  # noqa: B023
        except PageDamaged as error:
            if len(part) == 1:
                lost[part[0]] = str(error)
            else:
                middle = len(part) // 2
                parts += [part[:middle], part[middle:]]
    return found, lost


def session_ids(connection: Connection, tables: Sequence[Table] = LISTED) -> list[str]:
    """Every session that a readable table or index still names.

    Where one table has a damaged page, reading resumes at the next id that another table names.
    """
    known: set[str] = set(_by_creation(connection))
    holes = []
    for table in tables:
        found, is_whole = _walked(connection, table, ())
        known |= found
        if not is_whole:
            holes.append(table)
    for table in holes:
        known |= _walked(connection, table, sorted(known))[0]
    return sorted(known)


def _by_creation(connection: Connection) -> set[str]:
    """From both ends of the index over creation times, which names sessions whose rows may be lost."""
    found: set[str] = set()
    for newest_first in (False, True):
        place = (sessions.c.created_at, sessions.c.session_id)
        query = select(sessions.c.session_id).order_by(*(one.desc() if newest_first else one for one in place))
        at = 0
        while page := _page_or_none(connection, query.offset(at).limit(PAGE)):
            found.update(page)
            at += PAGE
        if page is not None:
            break
    return found


def _page_or_none(connection: Connection, query: Select[Any]) -> Sequence[str] | None:
    """None where the page is damaged. SQLite may also return a blob as an id, without an error."""
    page = attempt_or(connection, lambda again: list(again.execute(query).scalars()), None)
    return page if page is not None and all(isinstance(one, str) for one in page) else None


def _walked(connection: Connection, table: Table, known: Sequence[str]) -> tuple[set[str], bool]:
    """The sessions in a table by its key, skipping to the next of `known` at a damaged page; was all of it readable?"""
    column = table.c.session_id
    found: set[str] = set()
    is_whole = True
    where, after, limit = column > "", "", PAGE
    while True:
        query = select(column).where(where).distinct().order_by(column).limit(limit)
        page = _page_or_none(connection, query)
        if page and not _goes_on(connection, after, page):
            found.update(page)
            page = None
        if page is None and limit > 1:
            limit = max(1, limit // 8)
            continue
        if page is None:
            is_whole = False
            at = bisect_right(known, after)
            if at == len(known):
                return found, is_whole
            after = known[at]
            where = column >= after
            continue
        found.update(page)
        if len(page) < limit:
            return found, is_whole
        after, limit = page[-1], min(PAGE, limit * 8)
        where = column > after


def _goes_on(connection: Connection, after: str, page: Sequence[str]) -> bool:
    """Is it in order? On SQLite a changed key may be smaller than those before it, and a walk would never end."""
    if connection.dialect.name != "sqlite":  # it orders by its own collation
        return True
    return page[0] >= after and all(one < other for one, other in pairwise(page))


def rows_in_parts(
    connection: Connection, low: int, high: int, read: Callable[[Connection, int, int], Sequence[T]]
) -> tuple[list[T], list[int]]:
    """The rows numbered `low` to `high`, and the unreadable numbers. `read` takes the first and last number."""
    found: list[T] = []
    lost: list[int] = []
    waiting = [(low, high)] if low <= high else []
    while waiting:
        first, last = waiting.pop()
        try:
            found += attempt(connection, partial(read, first=first, last=last))  # type: ignore[call-arg]
        except PageDamaged:
            if first == last:
                lost.append(first)
            else:
                middle = (first + last) // 2
                waiting += [(first, middle), (middle + 1, last)]
    return found, sorted(lost)
