"""What the training feed and the page read of groups: plain functions over a Core connection."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, and_, case, exists, or_, select, tuple_

from app.domain.events import Failure, RolledBack, SessionCreated, SessionRestored, TurnCommitted
from app.domain.groups import GroupKey
from app.features.groups.rules import Attempt, in_order, of_one_kind
from app.features.groups.schema import group_changes, groups, is_finished
from app.store import rollouts
from app.store.content import matches
from app.store.damage import SPAN, of_readable
from app.store.dialect import now
from app.store.rollouts import among, group, in_groups, is_of_run, is_root
from app.store.schema import events, sessions
from app.store.selection import ANY, GroupFilter
from app.store.sessions import Acknowledgements, EventRow

_KEY = groups.c.run, groups.c.group_id
_NOTED = group_changes.c.run, group_changes.c.group_id

is_free = or_(groups.c.consumer.is_(None), groups.c.lease_until.is_(None), groups.c.lease_until <= now())
"""No consumer holds the group. The last one may still acknowledge it until another gets it."""


class Candidate(msgspec.Struct, frozen=True):
    """A complete group that may be leased; `oldest_version` is valid if `measured`."""

    run: str
    group_id: str
    completed_at: float
    sessions: int
    measured: bool
    oldest_version: int | None
    evaluation: bool = False

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.run, self.group_id)

    @property
    def place(self) -> tuple[float, str, str]:
        return self.completed_at, self.run, self.group_id


def keys(connection: Connection, after: GroupKey | None, limit: int, wanted: GroupFilter) -> list[GroupKey]:
    """Groups behind `after`, None: from the first, in the database's own order of ids, then of runs: an index has
    it."""
    place = sessions.c.group_id, sessions.c.run
    behind = sessions.c.group_id.is_not(None) if after is None else tuple_(*place) > (after.group_id, after.run)
    query = select(*place).where(behind, is_of_run, *wanted.of(sessions)).distinct().order_by(*place).limit(limit)
    return [GroupKey(row.run, row.group_id) for row in connection.execute(query) if row.group_id is not None]


def runs_of(connection: Connection, group_id: str, limit: int) -> list[str]:
    """The first runs that have a group of this id."""
    query = select(sessions.c.run).where(sessions.c.group_id == group_id, is_of_run).distinct().order_by(sessions.c.run)
    return list(connection.execute(query.limit(limit)).scalars())


class FeedLease(msgspec.Struct, frozen=True):
    """What the training feed knows of a group; `is_leased` as of now."""

    is_leased: bool
    is_acknowledged: bool


def leases(connection: Connection, keys: Sequence[GroupKey]) -> dict[GroupKey, FeedLease]:
    """Of the groups that the feed has handed out."""
    by_group: dict[GroupKey, FeedLease] = {}
    for at in range(0, len(keys), SPAN):
        query = select(*_KEY, groups.c.lease_until > now(), groups.c.acked_at.is_not(None))
        for row in connection.execute(query.where(among(keys[at : at + SPAN], groups))):
            by_group[GroupKey(row[0], row[1])] = FeedLease(bool(row[2]), bool(row[3]))
    return by_group


def has_notes(connection: Connection) -> bool:
    """Are there notes to settle?"""
    return connection.execute(select(group_changes.c.id).limit(1)).first() is not None


def noted(connection: Connection) -> list[GroupKey]:
    """The groups that have notes."""
    return [GroupKey(*row) for row in connection.execute(select(*_NOTED).distinct())]


def candidates(
    connection: Connection,
    *,
    held_by: str | None,
    attempts: int,
    oldest: int | None,
    after: tuple[float, str, str],
    limit: int,
    evaluation: bool = False,
    wanted: GroupFilter = ANY,
) -> list[Candidate]:
    """Complete, unacknowledged groups that are wanted, after `after`, oldest completion first.

    `held_by`: those that this consumer got last, even after its lease; None: those that are free. Only groups of which
    at least so many `attempts` have arrived (erased ones have, since they will not come again). Measured groups
    with a version below `oldest` are left out. `evaluation`: also groups of evaluations.
    """
    query = (
        select(*(groups.c[name] for name in Candidate.__struct_fields__))
        .where(
            groups.c.acked_at.is_(None),
            groups.c.completed_at.is_not(None),
            tuple_(groups.c.completed_at, *_KEY) > after,
            groups.c.arrived >= attempts,
            is_free if held_by is None else groups.c.consumer == held_by,
            *wanted.of(groups),
        )
        .order_by(groups.c.completed_at, *_KEY)
        .limit(limit)
    )
    if not evaluation:
        query = query.where(groups.c.evaluation.is_(False))
    if oldest is not None:
        young = or_(~groups.c.measured, groups.c.oldest_version.is_(None), groups.c.oldest_version >= oldest)
        query = query.where(young)
    return [Candidate(*row) for row in connection.execute(query)]


IS_ROLLOUT = and_(sessions.c.status != "undone", is_root(), is_of_run)
"""Condition on heads: a group counts the session."""

ATTEMPT = (
    sessions.c.session_id,
    sessions.c.attempt,
    sessions.c.reward,
    sessions.c.status,
    case((is_finished, True), else_=False),
    sessions.c.group_size,
    sessions.c.created_at,
    sessions.c.updated_at,
    sessions.c.evaluation,
    sessions.c.failed,
    sessions.c.engine_errors,
    sessions.c.tool_errors,
)


def attempt_of(row: Sequence[Any]) -> Attempt:
    """`row` has the columns ATTEMPT."""
    session_id, attempt, reward, status, finished, group_size, created_at, updated_at, evaluation, failed, *errors = row
    failure = None if failed is None else Failure(failed)
    known = session_id, attempt, reward, status, bool(finished), group_size, created_at, updated_at
    return Attempt(*known, bool(evaluation), failure, *errors)


def attempts(connection: Connection, keys: Sequence[GroupKey]) -> dict[GroupKey, list[Attempt]]:
    """The rollouts of each group in the order of their attempts, those without a number last."""
    by_group: dict[GroupKey, list[Attempt]] = {key: [] for key in keys}
    for at in range(0, len(keys), SPAN):
        query = select(sessions.c.run, sessions.c.group_id, *ATTEMPT).where(among(keys[at : at + SPAN]), IS_ROLLOUT)
        for run, group_id, *row in connection.execute(query):
            by_group[GroupKey(run, group_id)].append(attempt_of(row))
    return {key: in_order(of_group) for key, of_group in by_group.items()}


def with_metadata(
    connection: Connection, keys: Sequence[GroupKey], wanted: Mapping[str, Sequence[str]]
) -> Collection[GroupKey]:
    """Those of the groups of which a rollout's root has this metadata."""
    roots = {one.session_id: key for key, every in attempts(connection, keys).items() for one in every}
    return {roots[name] for name, fits in matches(connection, list(roots), wanted).items() if fits}


def of_agents(
    connection: Connection, root_ids: Sequence[str], status: Sequence[str] = ("closed", "erased")
) -> dict[str, list[str]]:
    """The sessions of each root's agents and children in one of these states."""
    by_group: dict[str, list[str]] = {}
    for at in range(0, len(root_ids), SPAN):
        for session_id, root_id in rollouts.members(connection, root_ids[at : at + SPAN], status=status):
            by_group.setdefault(root_id, []).append(session_id)
    return by_group


def uncounted_in(connection: Connection, keys: Sequence[GroupKey]) -> set[str]:
    """The rollouts that do not count in these groups, by their roots: replaced ones, and evaluations beside rollouts
    for training."""
    gone: set[str] = set()
    for of_group in attempts(connection, keys).values():
        counted = {one.session_id for one in of_one_kind(of_group) if not one.replaced}
        gone |= {one.session_id for one in of_group} - counted
    return gone


TurnEvents = dict[GroupKey, dict[str, list[EventRow]]]
"""Event rows by group and session."""

_AGING = (SessionCreated.__name__, TurnCommitted.__name__, RolledBack.__name__, SessionRestored.__name__)
"""Types of the events that say which turns are live, which of them are copies, and their weight versions."""


def turn_events(connection: Connection, keys: Sequence[GroupKey]) -> TurnEvents:
    """The events of some groups' closed sessions that say which turns are live and their weight versions; none of a
    session of which an event is on a damaged page, and no group of which a head is on one.

    Sessions of agents and children are included, those of rollouts that do not count are not.
    """
    members = of_readable(connection, keys, _closed_members)
    every = [session_id for of_group in members.values() for session_id in of_group]
    events_of = of_readable(connection, every, turn_events_of)
    return {
        key: {session_id: events_of.get(session_id, []) for session_id in session_ids}
        for key, session_ids in members.items()
    }


def _closed_members(connection: Connection, keys: Sequence[GroupKey]) -> dict[GroupKey, list[str]]:
    members: dict[GroupKey, list[str]] = {key: [] for key in keys}
    gone = uncounted_in(connection, keys)
    query = select(sessions.c.run, group(), sessions.c.session_id, sessions.c.root_id)
    for run, group_id, session_id, root_id in connection.execute(
        query.where(in_groups(keys), sessions.c.status == "closed")
    ):
        key = GroupKey(run, group_id)
        if key in members and gone.isdisjoint((session_id, root_id)):
            members[key].append(session_id)
    return members


def turn_events_of(connection: Connection, session_ids: Sequence[str]) -> dict[str, list[EventRow]]:
    """The same events of some sessions."""
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


def acknowledged_groups(
    connection: Connection, after: tuple[float, str, str], limit: int
) -> list[tuple[float, str, str]]:
    """Acknowledgement times, runs and ids of groups, after `after` in that order."""
    place = groups.c.acked_at, *_KEY
    query = select(*place).where(tuple_(*place) > after).order_by(*place).limit(limit)
    return [(row[0], row[1], row[2]) for row in connection.execute(query)]


_acknowledged = exists().where(
    groups.c.run == sessions.c.run, groups.c.group_id == group(), groups.c.acked_at.is_not(None)
)

ACKNOWLEDGEMENTS = Acknowledgements(or_(group().is_(None), sessions.c.evaluation, _acknowledged), acknowledged_groups)


class Waiting(msgspec.Struct, frozen=True):
    """A group that has not been acknowledged."""

    run: str
    group_id: str
    sessions: int
    erased: int
    unfinished: int
    arrived: int
    size: int | None
    completed_at: float | None
    measured: bool
    oldest_version: int | None
    consumer: str | None
    evaluation: bool
    is_leased: bool

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.run, self.group_id)


def waiting(connection: Connection, after: GroupKey, limit: int, wanted: GroupFilter = ANY) -> list[Waiting]:
    """Groups that have not been acknowledged, after `after`."""
    columns = [*(groups.c[name] for name in Waiting.__struct_fields__[:-1]), case((is_free, False), else_=True)]
    behind = tuple_(*_KEY) > after if wanted.run is None else groups.c.group_id > after.group_id
    query = select(*columns).where(groups.c.acked_at.is_(None), behind, *wanted.of(groups)).order_by(*_KEY).limit(limit)
    return [Waiting(*row) for row in connection.execute(query)]
