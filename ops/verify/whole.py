"""Checks what belongs to no single session: SQLite's file, the order of all events, and the groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import msgspec
from sqlalchemy import Connection, case, func, or_, select, tuple_, union

from app.domain.events import UnknownEvent
from app.domain.groups import oldest_version
from app.domain.restore import in_effect
from app.features.groups import reads as group_reads
from app.features.groups.reads import TurnEvents
from app.features.groups.schema import group_changes, groups, is_finished
from app.store.damage import attempt_or
from app.store.database import Database
from app.store.rollouts import is_root
from app.store.schema import events, sessions
from app.store.sessions import decode_events
from ops import restored
from ops.verify.report import STORE, Report

POSITIONS = 50_000
"""Positions in the order of events read in one query."""

GROUPS = 200
"""Groups read in one query."""

LOGS_READ = 16
"""Groups whose logs are read at the same time."""

Position = tuple[int, int]


MAX_PROBLEMS = 20
"""Problems that SQLite reports about its file, at most."""


async def check_file(database: Database, report: Report) -> None:
    """Check SQLite's pages and indexes. For PostgreSQL, `pg_amcheck` does that."""
    if not database.is_sqlite:
        return
    reported = await database.read(lambda c: attempt_or(c, _file_problems, ["a page at the root is damaged"]))
    for one in reported:
        report.found(STORE, f"the file: {one}")
    if reported:
        for table in await database.read(_tables):
            if not await database.read(lambda c: attempt_or(c, partial(_is_sound, table=table), False)):  # noqa: B023
                report.damaged_tables.append(table)


def _file_problems(connection: Connection) -> list[str]:
    reported = connection.exec_driver_sql(f"PRAGMA integrity_check({MAX_PROBLEMS})").scalars()
    return [one for one in reported if one != "ok"]


def _tables(connection: Connection) -> list[str]:
    return list(
        connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").scalars()
    )


def _is_sound(connection: Connection, table: str) -> bool:
    """Check one table and its indexes, so that the report can name the damaged table."""
    return connection.exec_driver_sql(f'PRAGMA integrity_check("{table}")').scalars().all() == ["ok"]


async def check_order(database: Database, report: Report, progress: Callable[[str], None]) -> None:
    """Check that no two events have the same position, and that no event names a transaction that has not begun."""
    newest, ahead = await database.read(restored.newest_tx)
    if ahead:
        report.found(STORE, f"events of transaction {newest}, which this server has not begun: run `turnlog restore`")
    after: Position = (0, 0)
    seen = 0
    while len(page := await database.read(partial(_positions, since=after))) > 1:
        for before, position in pairwise(page):
            if before >= position:
                problem = "two events are" if before == position else "an event is out of order"
                report.found(STORE, f"{problem} at transaction {position[0]}, position {position[1]}")
                return
        seen += len(page)
        progress(f"the order of {seen} events")
        after = page[-1]


def _positions(connection: Connection, since: Position) -> list[Position]:
    """The position `since`, if an event has it, and the next ones."""
    position = tuple_(events.c.tx, events.c.position)
    query = select(events.c.tx, events.c.position).where(position >= since).order_by(events.c.tx, events.c.position)
    return [(row[0], row[1]) for row in connection.execute(query.limit(POSITIONS))]


class _Members(msgspec.Struct, frozen=True):
    """Counts of a group's rollouts: those present, those erased, and those that are not finished; of evaluations, if
    there are no others."""

    present: int = 0
    erased: int = 0
    unfinished: int = 0
    evaluation: bool = False


class _Row(msgspec.Struct, frozen=True):
    """The stored row of a group."""

    sessions: int
    erased: int
    unfinished: int
    completed_at: float | None
    measured: bool
    oldest_version: int | None
    evaluation: bool


async def check_groups(database: Database, report: Report, progress: Callable[[str], None]) -> None:
    """Check each group's row against its sessions, except for groups that are noted as changed and not updated yet."""
    after = ""
    while ids := await database.read(partial(_group_ids, after=after)):
        report.add(await database.read(partial(_check_page, ids=ids), one_moment=True))
        progress(f"{report.groups} groups")
        after = ids[-1]


def _group_ids(connection: Connection, after: str) -> list[str]:
    """The next group ids, from the sessions and from the groups table."""
    parts = [
        select(table.c.group_id).where(table.c.group_id > after).distinct().order_by(table.c.group_id).limit(GROUPS)
        for table in (sessions, groups)
    ]
    named = union(*(select(part.subquery().c.group_id) for part in parts)).subquery()
    return list(connection.execute(select(named.c.group_id).order_by(named.c.group_id).limit(GROUPS)).scalars())


def _check_page(connection: Connection, ids: Sequence[str]) -> Report:
    report = Report()
    stored = _stored(connection, ids)
    members = _members(connection, list(stored))
    report.groups += len(ids)
    report.noted_groups += len(ids) - len(stored)
    for group_id, row in stored.items():
        _check_counts(group_id, row, members.get(group_id, _Members()), report)
    measured = {group_id: row for group_id, row in stored.items() if row is not None and row.measured}
    names = list(measured)
    for start in range(0, len(names), LOGS_READ):
        part = names[start : start + LOGS_READ]
        logs = group_reads.turn_events(connection, part)
        for group_id in part:
            _check_age(group_id, measured[group_id], logs, report)
    return report


def _stored(connection: Connection, ids: Sequence[str]) -> dict[str, _Row | None]:
    """The row, or None, of each group that is not noted as changed."""
    noted = set(connection.execute(select(group_changes.c.group_id).where(group_changes.c.group_id.in_(ids))).scalars())
    stored: dict[str, _Row | None] = dict.fromkeys(group_id for group_id in ids if group_id not in noted)
    columns = [groups.c[name] for name in _Row.__struct_fields__]
    for row in connection.execute(select(groups.c.group_id, *columns).where(groups.c.group_id.in_(stored))):
        stored[row[0]] = _Row(*row[1:])
    return stored


def _members(connection: Connection, ids: Sequence[str]) -> dict[str, _Members]:
    """Counts of rollouts, as a settled group has them."""
    is_erased = sessions.c.status == "erased"
    query = (
        select(
            sessions.c.group_id,
            func.sum(case((is_erased, 0), else_=1)),
            func.sum(case((is_erased, 1), else_=0)),
            func.sum(case((or_(is_erased, is_finished), 0), else_=1)),
            sessions.c.evaluation,
        )
        .where(sessions.c.group_id.in_(ids), sessions.c.status != "undone", is_root())
        .group_by(sessions.c.group_id, sessions.c.evaluation)
        .order_by(sessions.c.evaluation.desc())
    )
    # The rollouts for training come last, and replace evaluations.
    return {row[0]: _Members(*row[1:]) for row in connection.execute(query)}


def _check_counts(group_id: str, row: _Row | None, members: _Members, report: Report) -> None:
    if row is None:
        report.found(STORE, f"group {group_id}: neither a row nor a note that one is due")
        return
    found = _Members(row.sessions, row.erased, row.unfinished, row.evaluation)
    if found != members:
        report.found(STORE, f"group {group_id}: stored are {_counts(found)}; its sessions say {_counts(members)}")
    complete = members.present > 0 and members.unfinished == 0
    if complete != (row.completed_at is not None):
        report.found(STORE, f"group {group_id} is {'complete' if complete else 'incomplete'}, its row says otherwise")


def _counts(members: _Members) -> str:
    kind = "evaluations" if members.evaluation else "sessions"
    return f"{members.present} {kind}, {members.erased} erased, {members.unfinished} unfinished"


def _check_age(group_id: str, row: _Row, logs: TurnEvents, report: Report) -> None:
    """Check that the stored oldest weight version is that of the logs, and say where they cannot be read."""
    unchecked = f"group {group_id}: its oldest weight version was not checked"
    if group_id not in logs:
        report.found(STORE, f"{unchecked}: the heads of its sessions cannot be read")
        return
    if unread := [session_id for session_id, rows in logs[group_id].items() if not rows]:
        report.found(STORE, f"{unchecked}: events of {', '.join(unread)} cannot be read")
        return
    try:
        oldest = min(_oldest(logs, group_id), default=None)
    except UnknownEvent as error:
        report.found(STORE, f"{unchecked}: {error}")
        return
    if row.oldest_version != oldest:
        kept = row.oldest_version
        report.found(STORE, f"group {group_id}: its oldest weight version is {oldest}, its row says {kept}")


def _oldest(logs: TurnEvents, group_id: str) -> Iterator[int]:
    for rows in logs[group_id].values():
        version = oldest_version(one.event for one in in_effect(decode_events(rows)))
        if version is not None:
            yield version
