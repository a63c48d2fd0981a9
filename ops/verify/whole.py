"""Checks what belongs to no single session: SQLite's file, the order of all events, and the groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import msgspec
from sqlalchemy import Connection, select, true, tuple_, union

from app.domain.events import DEFAULT_RUN, UnknownEvent
from app.domain.groups import GroupKey, oldest_version
from app.domain.restore import in_effect
from app.features.groups import reads as group_reads
from app.features.groups.reads import TurnEvents
from app.features.groups.rules import GroupOutcome, outcome
from app.features.groups.schema import group_changes, groups
from app.store.damage import attempt_or
from app.store.database import Database
from app.store.rollouts import among, is_of_run
from app.store.schema import events, sessions
from app.store.sessions import EventRow, decode_events
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
    reported = await database.read(lambda c: attempt_or(c, _file_problems, ["a root page is damaged"]))
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


class _Row(msgspec.Struct, frozen=True):
    """The stored row of a group."""

    sessions: int
    erased: int
    unfinished: int
    arrived: int
    size: int | None
    completed_at: float | None
    measured: bool
    oldest_version: int | None
    evaluation: bool


async def check_groups(database: Database, report: Report, progress: Callable[[str], None]) -> None:
    """Check each group's row against its sessions, except for groups that are noted as changed and not updated yet."""
    after = GroupKey("", "")
    while keys := await database.read(partial(_group_keys, after=after)):
        report.add(await database.read(partial(_check_page, keys=keys), one_moment=True))
        progress(f"{report.groups} groups")
        after = keys[-1]


def _group_keys(connection: Connection, after: GroupKey) -> list[GroupKey]:
    """The next groups by id, then by run, from the sessions and from the groups table."""
    behind = after.group_id, after.run
    parts = [
        select(*(place := (table.c.group_id, table.c.run)))
        .where(tuple_(*place) > behind, there)
        .distinct()
        .order_by(*place)
        .limit(GROUPS)
        for table, there in ((sessions, is_of_run), (groups, true()))
    ]
    named = union(*(select(part.subquery()) for part in parts)).subquery()
    query = select(named.c.run, named.c.group_id).order_by(named.c.group_id, named.c.run).limit(GROUPS)
    return [GroupKey(*row) for row in connection.execute(query)]


def _check_page(connection: Connection, keys: Sequence[GroupKey]) -> Report:
    report = Report()
    stored = _stored(connection, keys)
    attempts = group_reads.attempts(connection, list(stored))
    report.groups += len(keys)
    report.noted_groups += len(keys) - len(stored)
    for key, row in stored.items():
        _check_counts(_named(key), row, outcome(attempts[key]), report)
    measured = {key: row for key, row in stored.items() if row is not None and row.measured}
    names = list(measured)
    for start in range(0, len(names), LOGS_READ):
        part = names[start : start + LOGS_READ]
        logs = group_reads.turn_events(connection, part)
        for key in part:
            _check_age(key, measured[key], logs, report)
    return report


def _named(key: GroupKey) -> str:
    return f"group {key.group_id}" + ("" if key.run == DEFAULT_RUN else f" of run {key.run}")


def _stored(connection: Connection, keys: Sequence[GroupKey]) -> dict[GroupKey, _Row | None]:
    """The row, or None, of each group that is not noted as changed."""
    changed = select(group_changes.c.run, group_changes.c.group_id).where(among(keys, group_changes))
    noted = {GroupKey(*row) for row in connection.execute(changed)}
    stored: dict[GroupKey, _Row | None] = dict.fromkeys(key for key in keys if key not in noted)
    columns = [groups.c[name] for name in _Row.__struct_fields__]
    query = select(groups.c.run, groups.c.group_id, *columns).where(among(list(stored), groups))
    for run, group_id, *row in connection.execute(query):
        stored[GroupKey(run, group_id)] = _Row(*row)
    return stored


def _check_counts(named: str, row: _Row | None, now: GroupOutcome, report: Report) -> None:
    if row is None:
        report.found(STORE, f"{named}: it has no row, and none is pending")
        return
    found = _counts(row.sessions, row.erased, row.unfinished, row.arrived, row.size, evaluation=row.evaluation)
    expected = _counts(now.rollouts, now.erased, now.unfinished, now.arrived, now.size, evaluation=now.evaluation)
    if found != expected:
        report.found(STORE, f"{named}: stored are {found}; its sessions say {expected}")
    if now.complete != (row.completed_at is not None):
        report.found(STORE, f"{named} is {'complete' if now.complete else 'incomplete'}, its row says otherwise")


def _counts(present: int, erased: int, unfinished: int, arrived: int, size: int | None, *, evaluation: bool) -> str:
    of_size, kind = "" if size is None else f" of {size}", "evaluations" if evaluation else "sessions"
    return f"{present} {kind}, {erased} erased, {unfinished} unfinished, {arrived}{of_size} attempts"


def _check_age(key: GroupKey, row: _Row, logs: TurnEvents, report: Report) -> None:
    """Check that the stored oldest weight version is that of the logs, and say where they cannot be read."""
    unchecked = f"{_named(key)}: its oldest weight version was not checked"
    if key not in logs:
        report.found(STORE, f"{unchecked}: the heads of its sessions cannot be read")
        return
    if unread := [session_id for session_id, rows in logs[key].items() if not rows]:
        report.found(STORE, f"{unchecked}: events of {', '.join(unread)} cannot be read")
        return
    try:
        oldest = min(_oldest(logs[key]), default=None)
    except UnknownEvent as error:
        report.found(STORE, f"{unchecked}: {error}")
        return
    if row.oldest_version != oldest:
        kept = row.oldest_version
        report.found(STORE, f"{_named(key)}: its oldest weight version is {oldest}, its row says {kept}")


def _oldest(logs: Mapping[str, Sequence[EventRow]]) -> Iterator[int]:
    for rows in logs.values():
        version = oldest_version(one.event for one in in_effect(decode_events(rows)))
        if version is not None:
            yield version
