"""What the training feed and the page read of groups: plain functions over a Core connection."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from sqlalchemy import Connection, case, exists, or_, select, tuple_

from app.domain.events import RolledBack, SessionCreated, SessionRestored, TurnCommitted
from app.features.groups.rules import Attempt
from app.features.groups.schema import group_changes, groups, is_finished
from app.store import rollouts
from app.store.content import matches
from app.store.damage import SPAN, of_readable
from app.store.dialect import now
from app.store.rollouts import group, in_groups, is_root
from app.store.schema import events, sessions
from app.store.selection import ANY, GroupFilter
from app.store.sessions import Acknowledgements, EventRow

is_free = or_(groups.c.consumer.is_(None), groups.c.lease_until.is_(None), groups.c.lease_until <= now())
"""No consumer holds the group. The last one may still acknowledge it until another gets it."""


class Candidate(msgspec.Struct, frozen=True):
    """A complete group that may be leased; `oldest_version` is valid if `measured`."""

    group_id: str
    completed_at: float
    sessions: int
    measured: bool
    oldest_version: int | None

    @property
    def place(self) -> tuple[float, str]:
        return self.completed_at, self.group_id


def ids(connection: Connection, after: str | None, limit: int, wanted: GroupFilter) -> list[str]:
    """Groups behind `after`, None: from the first, in the database's own order: an index has it."""
    query = (
        select(sessions.c.group_id)
        .where(sessions.c.group_id.is_not(None) if after is None else sessions.c.group_id > after, *wanted.of(sessions))
        .distinct()
        .order_by(sessions.c.group_id)
        .limit(limit)
    )
    return [group_id for group_id in connection.execute(query).scalars() if group_id is not None]


class FeedLease(msgspec.Struct, frozen=True):
    """What the training feed knows of a group; `is_leased` as of now."""

    is_leased: bool
    is_acknowledged: bool


def leases(connection: Connection, group_ids: Sequence[str]) -> dict[str, FeedLease]:
    """Of the groups that the feed has handed out."""
    by_group: dict[str, FeedLease] = {}
    for at in range(0, len(group_ids), SPAN):
        query = select(groups.c.group_id, groups.c.lease_until > now(), groups.c.acked_at.is_not(None))
        for row in connection.execute(query.where(groups.c.group_id.in_(group_ids[at : at + SPAN]))):
            by_group[row[0]] = FeedLease(bool(row[1]), bool(row[2]))
    return by_group


def has_notes(connection: Connection) -> bool:
    """Are there notes to settle?"""
    return connection.execute(select(group_changes.c.id).limit(1)).first() is not None


def noted(connection: Connection) -> list[str]:
    """The groups that have notes."""
    return list(connection.execute(select(group_changes.c.group_id).distinct()).scalars())


def candidates(
    connection: Connection,
    *,
    held_by: str | None,
    attempts: int,
    oldest: int | None,
    after: tuple[float, str],
    limit: int,
    wanted: GroupFilter = ANY,
) -> list[Candidate]:
    """Complete, unacknowledged groups after `after`, oldest completion first.

    `held_by`: those that this consumer got last, even after its lease; None: those that are free. Only groups of at
    least `attempts` sessions (erased ones count, since they will not come again). Measured groups with a version below
    `oldest` are left out.
    """
    query = (
        select(*(groups.c[name] for name in Candidate.__struct_fields__))
        .where(
            groups.c.acked_at.is_(None),
            groups.c.completed_at.is_not(None),
            tuple_(groups.c.completed_at, groups.c.group_id) > after,
            groups.c.sessions + groups.c.erased >= attempts,
            is_free if held_by is None else groups.c.consumer == held_by,
            *wanted.of(groups),
        )
        .order_by(groups.c.completed_at, groups.c.group_id)
        .limit(limit)
    )
    if oldest is not None:
        young = or_(~groups.c.measured, groups.c.oldest_version.is_(None), groups.c.oldest_version >= oldest)
        query = query.where(young)
    return [Candidate(*row) for row in connection.execute(query)]


def attempts(connection: Connection, group_ids: Sequence[str]) -> dict[str, list[Attempt]]:
    """The rollouts of each group in the order of their attempts, those without a number last."""
    by_group: dict[str, list[Attempt]] = {group_id: [] for group_id in group_ids}
    for at in range(0, len(group_ids), SPAN):
        query = select(
            sessions.c.group_id,
            sessions.c.session_id,
            sessions.c.attempt,
            sessions.c.reward,
            sessions.c.status,
            case((is_finished, True), else_=False),
        ).where(sessions.c.group_id.in_(group_ids[at : at + SPAN]), sessions.c.status != "undone", is_root())
        for row in connection.execute(query):
            by_group[row[0]].append(Attempt(*row[1:]))
    return {group_id: in_order(of_group) for group_id, of_group in by_group.items()}


def with_metadata(
    connection: Connection, group_ids: Sequence[str], wanted: Mapping[str, Sequence[str]]
) -> Collection[str]:
    """Those of the groups of which a rollout's root has this metadata."""
    roots = {one.session_id: group_id for group_id, every in attempts(connection, group_ids).items() for one in every}
    return {roots[name] for name, fits in matches(connection, list(roots), wanted).items() if fits}


def in_order(attempts: Iterable[Attempt]) -> list[Attempt]:
    return sorted(attempts, key=lambda one: (one.attempt is None, one.attempt or 0, one.session_id))


def of_agents(connection: Connection, root_ids: Sequence[str]) -> dict[str, list[str]]:
    """The closed and erased sessions of each root's agents and children."""
    by_group: dict[str, list[str]] = {}
    for at in range(0, len(root_ids), SPAN):
        for session_id, root_id in rollouts.members(connection, root_ids[at : at + SPAN], status=("closed", "erased")):
            by_group.setdefault(root_id, []).append(session_id)
    return by_group


TurnEvents = dict[str, dict[str, list[EventRow]]]
"""Event rows by group and session."""

_AGING = (SessionCreated.__name__, TurnCommitted.__name__, RolledBack.__name__, SessionRestored.__name__)
"""Types of the events that say which turns are live, which of them are copies, and their weight versions."""


def turn_events(connection: Connection, group_ids: Sequence[str]) -> TurnEvents:
    """The events of some groups' closed sessions that say which turns are live and their weight versions; none of a
    session of which an event is on a damaged page, and no group of which a head is on one.

    Sessions of agents and children are included.
    """
    members = of_readable(connection, group_ids, _closed_members)
    every = [session_id for of_group in members.values() for session_id in of_group]
    events_of = of_readable(connection, every, _turn_events_of)
    return {
        group_id: {session_id: events_of.get(session_id, []) for session_id in session_ids}
        for group_id, session_ids in members.items()
    }


def _closed_members(connection: Connection, group_ids: Sequence[str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {group_id: [] for group_id in group_ids}
    query = select(group(), sessions.c.session_id).where(in_groups(group_ids), sessions.c.status == "closed")
    for group_id, session_id in connection.execute(query):
        if group_id in members:
            members[group_id].append(session_id)
    return members


def _turn_events_of(connection: Connection, session_ids: Sequence[str]) -> dict[str, list[EventRow]]:
    query = (
        select(events.c.session_id, *(events.c[name] for name in EventRow._fields))
        .where(events.c.session_id.in_(session_ids), events.c.type.in_(_AGING))
        .order_by(events.c.session_id, events.c.seq)
    )
    logs: dict[str, list[EventRow]] = {session_id: [] for session_id in session_ids}
    for session_id, *row in connection.execute(query):
        if session_id in logs:  # a damaged index may lead to another session's rows
            logs[session_id].append(EventRow(*row))
    return logs


def acknowledged_groups(connection: Connection, after: tuple[float, str], limit: int) -> list[tuple[float, str]]:
    """Acknowledgement times and ids of groups, after `after` in that order."""
    place = tuple_(groups.c.acked_at, groups.c.group_id)
    query = (
        select(groups.c.acked_at, groups.c.group_id)
        .where(place > after)
        .order_by(groups.c.acked_at, groups.c.group_id)
        .limit(limit)
    )
    return [(row[0], row[1]) for row in connection.execute(query)]


_acknowledged = exists().where(groups.c.group_id == group(), groups.c.acked_at.is_not(None))

ACKNOWLEDGEMENTS = Acknowledgements(or_(group().is_(None), _acknowledged), acknowledged_groups)


class Waiting(msgspec.Struct, frozen=True):
    """A group that has not been acknowledged."""

    group_id: str
    sessions: int
    erased: int
    unfinished: int
    completed_at: float | None
    measured: bool
    oldest_version: int | None
    consumer: str | None
    is_leased: bool


def waiting(connection: Connection, after: str, limit: int, wanted: GroupFilter = ANY) -> list[Waiting]:
    """Groups that have not been acknowledged, with ids after `after`."""
    columns = [*(groups.c[name] for name in Waiting.__struct_fields__[:-1]), case((is_free, False), else_=True)]
    query = (
        select(*columns)
        .where(groups.c.acked_at.is_(None), groups.c.group_id > after, *wanted.of(groups))
        .order_by(groups.c.group_id)
        .limit(limit)
    )
    return [Waiting(*row) for row in connection.execute(query)]
