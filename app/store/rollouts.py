"""Rollouts: a rollout is a root session with the sessions of its agents and children.

`sessions.root_id` is the last session in a session's line of parents, set when the session is created. If that root
does not exist (yet), each session counts as its own rollout. A session created in the middle of a line also takes over
the sessions that named it as their root.

A group counts roots. A rollout is finished when its root is closed and has a reward or has failed, and its other
sessions are closed and have the reward, if there is one, in their logs; erased sessions do not count.

`root_id IS NOT NULL` is repeated beside conditions that imply it; otherwise PostgreSQL's planner does not use the
partial index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Text,
    and_,
    bindparam,
    case,
    exists,
    func,
    literal_column,
    or_,
    select,
    tuple_,
    union_all,
    update,
)

from app.domain.events import (
    Failure,
    RewardAssigned,
    SessionClosed,
    SessionCreated,
    SessionRestored,
    UnknownEvent,
    decode,
)
from app.domain.groups import GroupKey, Root
from app.store.dialect import ForEach, Reads, Tx
from app.store.schema import erased_runs, events, sessions

REWARD = RewardAssigned.__name__
CLOSED = SessionClosed.__name__
RESTORED = SessionRestored.__name__

_roots = sessions.alias("roots")
_members = sessions.alias("members")


def is_root(table: FromClause = sessions) -> ColumnElement[bool]:
    """Condition on heads: the session has no existing root in its run."""
    of_run = _roots.c.session_id == table.c.root_id, _roots.c.run == table.c.run
    there = exists().where(*of_run, _roots.c.status != "undone").correlate(table)
    return or_(table.c.root_id.is_(None), ~there)


is_of_run: ColumnElement[bool] = or_(
    sessions.c.status != "erased",
    ~exists().where(erased_runs.c.run == sessions.c.run, sessions.c.created_at <= erased_runs.c.upto),
)
"""Condition on heads: the session is the run's, not that of an erased one of the same name."""


def group() -> ColumnElement[str | None]:
    """Expression on heads: the group that counts the session's rollout, of the session's own run, which is its
    root's."""
    of_root = select(_roots.c.group_id).where(_roots.c.session_id == sessions.c.root_id).correlate(sessions)
    return case((is_root(), sessions.c.group_id), else_=of_root.scalar_subquery())


def among(keys: Sequence[GroupKey], table: FromClause = sessions) -> ColumnElement[bool]:
    """Condition on heads, or on another table with these columns: the row is of one of these groups."""
    runs, ids = {key.run for key in keys}, {key.group_id for key in keys}
    of_each = table.c.run.in_(sorted(runs)), table.c.group_id.in_(sorted(ids))  # SQLite has no index for the pairs
    if len(runs) == 1 or len(ids) == 1:
        return and_(*of_each)
    return and_(*of_each, tuple_(table.c.run, table.c.group_id).in_(keys))


def in_groups(keys: Sequence[GroupKey]) -> ColumnElement[bool]:
    """Condition on heads: the session's rollout counts in one of these groups."""
    there = _members.c.status != "undone"
    named = select(_members.c.session_id).where(among(keys, _members), there, is_root(_members))
    theirs = (
        select(_members.c.session_id)
        .join_from(_members, _roots, _roots.c.session_id == _members.c.root_id)
        .where(among(keys, _roots), there, _roots.c.status != "undone")
    )
    return sessions.c.session_id.in_(union_all(named, theirs))


# Groups that have changed, and the root of a new session.

_root_of = select(sessions.c.root_id).where(sessions.c.session_id == bindparam("sid"))
_key_of = select(sessions.c.run, sessions.c.group_id).where(sessions.c.session_id == bindparam("sid"))
_adopt = update(sessions).where(sessions.c.root_id == bindparam("sid")).values(root_id=bindparam("top"))
_below = ForEach(
    lambda given: (
        select(sessions.c.root_id, sessions.c.session_id, sessions.c.group_id, sessions.c.run)
        .where(sessions.c.root_id == given.sid, sessions.c.root_id.is_not(None))
        .order_by(sessions.c.session_id)
    ),
    sid=Text,
)


def note(tx: Tx, run: str, group_id: str | None, root_id: str | None = None) -> None:
    """Tell that a session of this group has changed; if its root `root_id` exists, the root's group."""
    root = None if root_id is None else tx.one(_key_of, {"sid": root_id})
    note_groups(tx, [(run, group_id) if root is None else (root[0], root[1])])


def note_groups(tx: Tx, named: Iterable[tuple[str, str | None]]) -> None:
    """Tell that sessions of these groups have changed: of each the run and the id, None for no group."""
    changed = [GroupKey(run, group_id) for run, group_id in named if group_id is not None]
    if changed:
        for follow in tx.points.changed:
            follow(tx, changed)


def root_of(tx: Reads, session_id: str) -> str | None:
    """None for a root."""
    row = tx.one(_root_of, {"sid": session_id})
    return None if row is None else row[0]


def root_for(tx: Tx, parent: str) -> str:
    """The root of a new child of `parent`."""
    return root_of(tx, parent) or parent


def below(tx: Tx, session_ids: Iterable[str]) -> list[tuple[str, str, str | None, str]]:
    """The sessions that name one of these as their root, whether it is there or not: the root, the session, its group
    and its run."""
    return [(row[0], row[1], row[2], row[3]) for row in tx.each(_below, [{"sid": one} for one in session_ids])]


def adopt(tx: Tx, roots: Mapping[str, str | None]) -> dict[str, tuple[str, ...]]:
    """Make new sessions, each with its own root, part of the lines that named them before they were there.

    Returns the sessions of these lines by the new one; `JoinRollout` has to tell each of them.
    """
    adopted: dict[str, tuple[str, ...]] = {}
    counted_in: set[tuple[str, str]] = set()  # until now
    for session_id, member, group_id, run in below(tx, roots):
        adopted[session_id] = (*adopted.get(session_id, ()), member)
        if group_id is not None:
            counted_in.add((run, group_id))
    note_groups(tx, sorted(counted_in))
    for session_id in adopted:
        if (root_id := roots[session_id]) is not None:
            tx.run(_adopt, {"sid": session_id, "top": root_id})
    return adopted


# What the logs say.

_created = select(events.c.version, events.c.data).where(events.c.session_id == bindparam("sid"), events.c.seq == 1)
_restored = select(func.coalesce(func.max(events.c.seq), 0)).where(
    events.c.session_id == bindparam("sid"), events.c.type == RESTORED
)
_rewards = (
    select(events.c.version, events.c.data)
    .where(events.c.session_id == bindparam("sid"), events.c.type == REWARD, events.c.seq > _restored.scalar_subquery())
    .order_by(events.c.seq.desc())
)


def root_in_logs(tx: Reads, session_id: str, parent: str | None) -> str | None:
    """As `root_id` must be, by the logs of the session's line of parents; None for a root.

    A line that comes back to where it has been, which no creation allows, ends there.
    """
    at, seen = session_id, set[str]()
    while parent is not None and at not in seen:
        seen.add(at)
        at, parent = parent, _parent(tx, parent)
    return None if at == session_id else at


def _parent(tx: Reads, session_id: str) -> str | None:
    row = tx.one(_created, {"sid": session_id})
    if row is None:
        return root_of(tx, session_id)
    try:
        event = decode(SessionCreated.__name__, row[0], bytes(row[1]))
    except UnknownEvent:
        return None
    return event.config.parent if isinstance(event, SessionCreated) else None


def has_limits(tx: Tx, session_id: str) -> bool:
    """Has the root limits that hold for its whole rollout? False also where its log cannot be read."""
    row = tx.one(_created, {"sid": session_id})
    try:
        event = None if row is None else decode(SessionCreated.__name__, row[0], bytes(row[1]))
    except UnknownEvent:
        return False
    limits = event.config.limits if isinstance(event, SessionCreated) else None
    return limits is not None and limits.per == "rollout"


def last_reward(tx: Tx, session_id: str, *, of_root: bool) -> RewardAssigned | None:
    """The newest of a session's own rewards, or of those of its root in its log; turns' own do not count, nor do those
    that a restore took back.

    None also where the log cannot be read: that is for whoever reads the session to say.
    """
    for version, data in tx.all(_rewards, {"sid": session_id}):
        try:
            event = decode(REWARD, version, bytes(data))
        except UnknownEvent:
            return None
        if isinstance(event, RewardAssigned) and event.turn is None and event.of_root == of_root:
            return event
    return None


_failed = select(sessions.c.failed).where(sessions.c.session_id == bindparam("sid"))
_last_close = (
    select(events.c.version, events.c.data)
    .where(events.c.session_id == bindparam("sid"), events.c.type == CLOSED)
    .order_by(events.c.seq.desc())
    .limit(1)
)


def failure_of(tx: Reads, session_id: str) -> Failure | None:
    """The failure with which the session was closed, unless a reward has come since."""
    row = tx.one(_failed, {"sid": session_id})
    if row is None or row[0] is None:
        return None
    close = tx.one(_last_close, {"sid": session_id})
    try:
        event = None if close is None else decode(CLOSED, close[0], bytes(close[1]))
    except UnknownEvent:
        event = None
    # A restore may have gone back to before the last close.
    failed = event.failed if isinstance(event, SessionClosed) else None
    return failed if failed is not None and failed.kind == row[0] else Failure(row[0])


_evaluation = select(sessions.c.evaluation).where(sessions.c.session_id == bindparam("sid"))


def is_evaluation(tx: Reads, session_id: str) -> bool:
    row = tx.one(_evaluation, {"sid": session_id})
    return row is not None and bool(row[0])


_a_member = (
    select(sessions.c.session_id)
    .where(sessions.c.root_id == bindparam("sid"), sessions.c.root_id.is_not(None))
    .limit(1)
)


def may_have_members(tx: Tx, root_id: str) -> bool:
    """May a session be below this root? On SQLite that is known.

    On PostgreSQL it is to be read after the commit: a session that another transaction creates meanwhile is
    not seen here, and does not see what happens to its root.
    """
    return tx.is_remote or tx.one(_a_member, {"sid": root_id}) is not None


# What can be read.


def root_below(connection: Connection, parent: str) -> str:
    """As `root_for`, of what is committed."""
    return connection.execute(_root_of, {"sid": parent}).scalar() or parent


def count_below(connection: Connection, root_id: str, most: int) -> int:
    """Number of sessions in any state with this root, counted up to `most`."""
    below = select(sessions.c.session_id).where(sessions.c.root_id == root_id).limit(most).subquery()
    return connection.execute(select(func.count()).select_from(below)).scalar_one()


class RootState(msgspec.Struct, frozen=True):
    """A session's root, if it exists."""

    root_id: str
    status: str
    reward: float | None
    run: str
    evaluation: bool


def standing(connection: Connection, session_id: str) -> RootState | None:
    """The root's state; None without an existing root."""
    query = (
        select(_roots.c.session_id, _roots.c.status, _roots.c.reward, _roots.c.run, _roots.c.evaluation)
        .join_from(sessions, _roots, _roots.c.session_id == sessions.c.root_id)
        .where(sessions.c.session_id == session_id)
    )
    row = connection.execute(query).first()
    return None if row is None else RootState(*row)


def members(
    connection: Connection, root_ids: Sequence[str], *, status: Sequence[str], after: str = "", limit: int | None = None
) -> list[tuple[str, str]]:
    """The sessions of these roots' rollouts but the roots themselves, each with its root, in the order of their ids.

    One of another run, created at the same moment as the root, is none of them.
    """
    query = (
        select(sessions.c.session_id, sessions.c.root_id)
        .join_from(sessions, _roots, _roots.c.session_id == sessions.c.root_id)
        .where(
            sessions.c.root_id.in_(root_ids),
            sessions.c.root_id.is_not(None),
            sessions.c.run == _roots.c.run,
            sessions.c.status.in_(status),
            sessions.c.session_id > after,
        )
        .order_by(sessions.c.session_id)
        .limit(limit)
    )
    return [(row[0], row[1]) for row in connection.execute(query)]


Place = tuple[str, str]
"""A root and a session of its rollout: in this order an index has those that have one, and no others."""


def outliving(connection: Connection, after: Place, limit: int) -> list[Place]:
    """Open sessions behind `after` whose root is there and not open."""
    return _behind(
        connection,
        after,
        limit,
        sessions.c.status == literal_column("'open'"),
        _roots.c.status != "open",
    )


def without_roots_reward(connection: Connection, after: Place, limit: int, run: str | None = None) -> list[Place]:
    """Sessions behind `after` whose reward is not the one that their root has; looks at all that have a root. `run`:
    only of this run."""
    return _behind(
        connection,
        after,
        limit,
        sessions.c.status != "erased",
        _roots.c.status != "erased",
        _roots.c.reward.is_not(None),
        sessions.c.reward.is_distinct_from(_roots.c.reward),
        *([] if run is None else [sessions.c.run == run]),
    )


def _behind(connection: Connection, after: Place, limit: int, *conditions: ColumnElement[bool]) -> list[Place]:
    place = tuple_(sessions.c.root_id, sessions.c.session_id)
    query = (
        select(sessions.c.root_id, sessions.c.session_id)
        .join_from(sessions, _roots, _roots.c.session_id == sessions.c.root_id)
        .where(sessions.c.root_id.is_not(None), place > after, *conditions)
        .order_by(sessions.c.root_id, sessions.c.session_id)
        .limit(limit)
    )
    return [(row[0], row[1]) for row in connection.execute(query)]


def roots_of(connection: Connection, session_ids: Sequence[str]) -> dict[str, Root]:
    """Of those of the sessions that are no roots themselves."""
    query = (
        select(sessions.c.session_id, sessions.c.root_id, _roots.c.session_id, _roots.c.group_id)
        .select_from(sessions.outerjoin(_roots, _roots.c.session_id == sessions.c.root_id))
        .where(sessions.c.session_id.in_(session_ids), sessions.c.root_id.is_not(None))
    )
    return {row[0]: Root(row[1], row[2] is not None, row[3]) for row in connection.execute(query)}
