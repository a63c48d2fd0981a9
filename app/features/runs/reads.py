"""What is read of runs: their names, their rows, and the figures that follow from the heads of their sessions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, case, exists, func, literal_column, or_, select, tuple_, union

from app.domain.events import LimitReached, SessionRestored, TurnAbandoned, TurnCommitted, TurnRejected
from app.features.groups.schema import groups
from app.features.runs.schema import runs
from app.store.rollouts import is_of_run, is_root
from app.store.schema import events, sessions
from app.store.sessions import EventRow

RESTORED = SessionRestored.__name__
COUNTED = (*(kind.__name__ for kind in (TurnCommitted, TurnRejected, TurnAbandoned, LimitReached)), RESTORED)
"""Types of the events that figures are made of."""


class RunRow(msgspec.Struct, frozen=True):
    """A row of `runs`; `metadata` is JSON, `note` UTF-8."""

    run: str
    status: Literal["open", "closed", "erasing"]
    max_live: int | None
    max_tokens: int | None
    used_tokens: int
    metadata: bytes | None
    note: bytes | None


class HeadCount(NamedTuple):
    """The sessions of a run that are alike: their number, their turns and errors, when the first was created and the
    last changed, and their largest and smallest weight version. `reward` is that of a root that has not failed,
    `failed` the kind of a root's failure. An evaluation has neither, and no weight version.
    """

    run: str
    status: str
    reward: float | None
    failed: str | None
    sessions: int
    turns: int
    engine_errors: int
    tool_errors: int
    first_at: float
    last_at: float
    newest: int | None
    oldest: int | None


class GroupCount(NamedTuple):
    """A run's groups. A group that was acknowledged was handed out, and is complete."""

    run: str
    complete: int
    handed_out: int
    acknowledged: int


def names(connection: Connection, after: str, limit: int) -> list[str]:
    """Names of runs behind `after`, in the database's own order; of some no session may be left.

    The names of sessions are found one by one in their index, however many sessions a run has.
    """
    next_name = select(func.min(sessions.c.run).label("run"))
    step = next_name.where(sessions.c.run > after).cte("step", recursive=True)
    following = next_name.where(sessions.c.run > step.c.run).scalar_subquery()
    step = step.union_all(select(following).select_from(step).where(step.c.run.is_not(None)))
    first = select(step.c.run).where(step.c.run.is_not(None)).limit(limit).subquery()
    of_sessions = select(first.c.run)
    given = select(runs.c.run).where(runs.c.run > after)
    every = union(of_sessions, given).subquery()
    return list(connection.execute(select(every.c.run).order_by(every.c.run).limit(limit)).scalars())


def rows(connection: Connection, names: Sequence[str]) -> dict[str, RunRow]:
    """Of those that have one."""
    columns = [runs.c[name] for name in RunRow.__struct_fields__]
    query = select(*columns).where(runs.c.run.in_(names))
    return {row[0]: RunRow(*row) for row in connection.execute(query)}


def heads(connection: Connection, names: Sequence[str]) -> list[HeadCount]:
    """The sessions of these runs, counted by what is alike, in one query over their heads."""
    trains = sessions.c.evaluation.is_(False)
    failed = case((and_(trains, is_root()), sessions.c.failed))
    reward = case((and_(trains, is_root(), sessions.c.failed.is_(None)), sessions.c.reward))
    version = case((trains, sessions.c.weight_version))
    alike = (sessions.c.run, sessions.c.status, reward, failed)
    query = (
        select(
            *alike,
            func.count(),
            func.sum(sessions.c.turns),
            func.sum(sessions.c.engine_errors),
            func.sum(sessions.c.tool_errors),
            func.min(sessions.c.created_at),
            func.max(sessions.c.updated_at),
            func.max(version),
            func.min(version),
        )
        .where(sessions.c.run.in_(names), sessions.c.status != "undone", is_of_run)
        .group_by(*alike)
    )
    return [HeadCount(*row) for row in connection.execute(query)]


def group_counts(connection: Connection, names: Sequence[str]) -> dict[str, GroupCount]:
    query = (
        select(
            groups.c.run,
            func.sum(case((groups.c.completed_at.is_not(None), 1), else_=0)),
            func.sum(case((groups.c.handed_out > 0, 1), else_=0)),
            func.sum(case((groups.c.acked_at.is_not(None), 1), else_=0)),
        )
        .where(groups.c.run.in_(names))
        .group_by(groups.c.run)
    )
    return {row[0]: GroupCount(*row) for row in connection.execute(query)}


def figures(
    connection: Connection, names: Sequence[str]
) -> tuple[dict[str, RunRow], list[HeadCount], dict[str, GroupCount]]:
    """What figures of these runs are made of, of one moment."""
    return rows(connection, names), heads(connection, names), group_counts(connection, names)


def versions(connection: Connection, run: str) -> dict[str, int]:
    """The run's sessions, and the number of the last event of each."""
    query = select(sessions.c.session_id, sessions.c.version)
    return dict(connection.execute(query.where(sessions.c.run == run, is_of_run)).all())


def turn_ends(connection: Connection, after: Iterable[tuple[str, int]]) -> dict[str, list[EventRow]]:
    """Of each session the events after a number that figures are made of; all of them if a restore is among these."""
    columns = [events.c[name] for name in EventRow._fields]

    def read(session_id: str, seq: int) -> list[EventRow]:
        of_session = events.c.session_id == session_id, events.c.seq > seq, events.c.type.in_(COUNTED)
        query = select(*columns).where(*of_session).order_by(events.c.seq)
        return [EventRow(*row) for row in connection.execute(query)]

    found = {session_id: read(session_id, seq) for session_id, seq in after}
    restored = [session_id for session_id, rows in found.items() if any(row.type == RESTORED for row in rows)]
    return found | {session_id: read(session_id, 0) for session_id in restored}


class Work(NamedTuple):
    """Runs with a limit on tokens; runs that are closed and have an open session; runs that are being erased."""

    limited: list[RunRow]
    closing: list[str]
    erasing: list[str]


def limited(connection: Connection) -> list[RunRow]:
    """Runs with a limit on tokens."""
    columns = [runs.c[name] for name in RunRow.__struct_fields__]
    query = select(*columns).where(runs.c.max_tokens.is_not(None), runs.c.status == "open")
    return [RunRow(*row) for row in connection.execute(query)]


def given(connection: Connection, limit: int) -> dict[str, int]:
    """The first open runs that were given something, by name, with their open sessions."""
    is_live = sessions.c.run == runs.c.run, sessions.c.status == literal_column("'open'")  # as the index has it
    live = select(func.count()).select_from(sessions).where(*is_live).scalar_subquery()
    query = select(runs.c.run, live).where(runs.c.status == "open").order_by(runs.c.run).limit(limit)
    return {row[0]: row[1] for row in connection.execute(query)}


def work(connection: Connection) -> Work:
    has_open = exists().where(sessions.c.run == runs.c.run, sessions.c.status == "open")
    closing = select(runs.c.run).where(runs.c.status == "closed", has_open)
    erasing = select(runs.c.run).where(runs.c.status == "erasing")
    return Work(
        limited(connection),
        list(connection.execute(closing).scalars()),
        list(connection.execute(erasing).scalars()),
    )


def _is(*status: str) -> ColumnElement[bool]:
    """Condition on heads. A run that has ended gets no session, until it is erased and another has its name: it is
    asked for where sessions are read in order to end them."""
    return exists().where(runs.c.run == sessions.c.run, runs.c.status.in_(status))


def open_sessions(connection: Connection, run: str, limit: int) -> list[str]:
    """Open sessions of the run, roots before the rest; none unless it is closed or being erased."""
    query = select(sessions.c.session_id).where(
        sessions.c.run == run, sessions.c.status == "open", _is("closed", "erasing")
    )
    return list(connection.execute(query.order_by(sessions.c.root_id.is_not(None)).limit(limit)).scalars())


Place = tuple[float, str]


def roots(connection: Connection, run: str, after: Place, limit: int) -> list[Place]:
    """Roots of a run that is being erased, erased ones too, behind `after` as they were created; else none."""
    place = tuple_(sessions.c.created_at, sessions.c.session_id)
    query = select(sessions.c.created_at, sessions.c.session_id).where(
        sessions.c.run == run, place > after, is_root(), is_of_run, _is("erasing")
    )
    found = connection.execute(query.order_by(sessions.c.created_at, sessions.c.session_id).limit(limit))
    return [(row[0], row[1]) for row in found]


# The page's view of a run.


def _trains(run: str) -> ColumnElement[bool]:
    """Condition on heads: the session is the run's, and no evaluation."""
    return and_(sessions.c.run == run, sessions.c.status != "undone", ~sessions.c.evaluation, is_of_run)


class VersionCount(NamedTuple):
    """The sessions whose newest weights are of a version; `rewarded` and `mean_reward` are of rollouts that did not
    fail, by their roots, `failed` are those that did."""

    version: int
    sessions: int
    open: int
    turns: int
    engine_errors: int
    tool_errors: int
    rewarded: int
    mean_reward: float | None
    failed: int


def version_counts(connection: Connection, run: str, limit: int) -> list[VersionCount]:
    """The newest weight versions of a run, newest first."""
    head = sessions.c
    reward = case((and_(is_root(), head.failed.is_(None)), head.reward))
    query = (
        select(
            head.weight_version,
            func.count(),
            func.sum(case((head.status == "open", 1), else_=0)),
            func.sum(head.turns),
            func.sum(head.engine_errors),
            func.sum(head.tool_errors),
            func.count(reward),
            func.avg(reward),
            func.count(head.failed),
        )
        .where(_trains(run), head.weight_version.is_not(None))
        .group_by(head.weight_version)
    )
    newest = query.order_by(head.weight_version.desc()).limit(limit)
    return [VersionCount(*row) for row in connection.execute(newest)]


def newest_weights(connection: Connection, run: str, since: int) -> dict[str, int]:
    """By session, its newest weight version; those from `since` on."""
    query = select(sessions.c.session_id, sessions.c.weight_version)
    return dict(connection.execute(query.where(_trains(run), sessions.c.weight_version >= since)).all())


def failures(connection: Connection, run: str) -> dict[str, int]:
    """How many rollouts failed, by kind."""
    query = select(sessions.c.failed, func.count()).where(_trains(run), sessions.c.failed.is_not(None))
    return dict(connection.execute(query.group_by(sessions.c.failed).order_by(sessions.c.failed)).all())


class GroupSums(NamedTuple):
    """A group's rewards, and when its first session was created."""

    group_id: str
    rewarded: int
    mean: float | None
    min: float | None
    max: float | None
    since: float

    @property
    def is_flat(self) -> bool:
        """There are several rewards, and all are equal."""
        return self.rewarded > 1 and self.min == self.max


def group_sums(connection: Connection, run: str, limit: int, *, stuck: bool) -> list[GroupSums]:
    """A run's groups, those that were begun last first; with `stuck` those that still wait for an attempt or for one's
    end, the oldest first. A rollout that was replaced may let its group seem to wait."""
    head = sessions.c
    reward = case((head.failed.is_(None), head.reward))
    waits = or_(head.status == "open", and_(head.reward.is_(None), head.failed.is_(None)))
    arrived = func.count(func.distinct(head.attempt)) + func.sum(case((head.attempt.is_(None), 1), else_=0))
    since = func.min(head.created_at)
    query = (
        select(head.group_id, func.count(reward), func.avg(reward), func.min(reward), func.max(reward), since)
        .where(_trains(run), head.group_id.is_not(None), head.status != "erased", is_root())
        .group_by(head.group_id)
        .limit(limit)
    )
    if stuck:
        is_waiting = or_(func.sum(case((waits, 1), else_=0)) > 0, arrived < func.max(head.group_size))
        query = query.having(is_waiting).order_by(since, head.group_id)
    else:
        query = query.order_by(since.desc(), head.group_id)
    return [GroupSums(*row) for row in connection.execute(query)]
