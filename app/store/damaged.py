"""Reading around damaged pages: of many sessions those that can be read, and why the others cannot.

Slower by far than an ordinary read, and used only behind one that has met a damaged page (`Database.read`, `or_else`).
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

AT_ONCE = 64
"""Sessions asked for together, before their part is halved."""

PAGE = 512
"""Ids asked for together."""

LISTED: Sequence[Table] = (sessions, events, turns)
"""A session whose page is lost in one of them is mostly found in another."""


class PageDamaged(Exception):
    """What was asked for lies on a damaged page; the connection goes on."""


def attempt(connection: Connection, read: Callable[[Connection], T]) -> T:
    """Raises PageDamaged. PostgreSQL ends a transaction with its first error, so it gets one within."""
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


def split(
    connection: Connection, ids: Sequence[str], read: Callable[[Connection, Sequence[str]], Mapping[str, T]]
) -> tuple[dict[str, T], dict[str, str]]:
    """What `read` gives of each session, and of those that cannot be read why."""
    found: dict[str, T] = {}
    lost: dict[str, str] = {}
    waiting = [ids[at : at + AT_ONCE] for at in range(0, len(ids), AT_ONCE)]
    while waiting:
        part = waiting.pop()
        try:
            found |= attempt(connection, lambda again: read(again, part))  # noqa: B023
        except PageDamaged as error:
            if len(part) == 1:
                lost[part[0]] = str(error)
            else:
                middle = len(part) // 2
                waiting += [part[:middle], part[middle:]]
    return found, lost


def session_ids(connection: Connection, tables: Sequence[Table] = LISTED) -> list[str]:
    """Every session of which a table or an index that can be read still knows.

    Where one ends in a damaged page, it is entered again at the next id that another one knows.
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
    """From the index over the times of creation, which names sessions whose rows may be lost; from both its ends."""
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
    """None where the page is damaged; SQLite takes a blob for an id, and says so nowhere."""
    try:
        page = attempt(connection, lambda again: list(again.execute(query).scalars()))
    except PageDamaged:
        return None
    return page if all(isinstance(one, str) for one in page) else None


def _walked(connection: Connection, table: Table, known: Sequence[str]) -> tuple[set[str], bool]:
    """The sessions in a table by its key, jumping to the next of `known` where it cannot be read; was it whole?"""
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
    """Rows by number from `low` to `high`, and the numbers that cannot be read. `read` takes a first and a last one."""
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
