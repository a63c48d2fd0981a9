"""What the training feed knows of groups, the notes of what has changed, and when a rollout is finished."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Double,
    Identity,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    and_,
    bindparam,
    delete,
    exists,
    false,
    insert,
    or_,
    select,
)

from app.domain.groups import GroupKey
from app.store.dialect import StorePoints, Tx
from app.store.schema import NAMING, SHORT_LIVED, sessions

metadata = MetaData(naming_convention=NAMING)

groups = Table(
    "groups",
    metadata,
    Column("run", String(128), primary_key=True),
    Column("group_id", Text, primary_key=True),
    Column("sessions", Integer, nullable=False),
    Column("erased", Integer, nullable=False),
    Column("unfinished", Integer, nullable=False),
    Column("arrived", Integer, nullable=False),
    Column("size", Integer),
    Column("completed_at", Double),
    Column("measured", Boolean, nullable=False),
    Column("oldest_version", BigInteger),
    Column("consumer", String(128)),
    Column("lease_until", Double),
    Column("handed_out", Integer, nullable=False),
    Column("acked_at", Double),
    Column("evaluation", Boolean, server_default=false(), nullable=False),
)
"""What the training feed knows of each group of sessions of a run.

Derived from `sessions` (`rules.outcome`): how many are there, how many more have been erased, how many are not
finished, how many attempts have arrived, how many it waits for (null: it is not known), and when the last of them was
finished (null while one is not), all of those of one kind (`rules.of_one_kind`), and whether that is evaluations.
Derived from the log once the group is complete
(`measured`): the smallest weight version of a live sampled token, null where none is a number.
The feed's own, and nowhere else: who has the group until when (the database's clock), how often it was handed
out, and when it was acknowledged.
"""
_unacknowledged = groups.c.acked_at.is_(None)
_waiting = and_(groups.c.acked_at.is_(None), groups.c.completed_at.is_not(None))
Index(
    "ix_groups_run_completed_at_group_id",
    groups.c.run,
    groups.c.completed_at,
    groups.c.group_id,
    sqlite_where=_waiting,
    postgresql_where=_waiting,
)
Index("ix_groups_consumer", groups.c.consumer, sqlite_where=_unacknowledged, postgresql_where=_unacknowledged)
Index("ix_groups_acked_at_run_group_id", groups.c.acked_at, groups.c.run, groups.c.group_id)

group_changes = Table(
    "group_changes",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), Identity(), primary_key=True),
    Column("run", String(128), nullable=False),
    Column("group_id", Text, nullable=False),
    postgresql_with=SHORT_LIVED,
)
"""Groups whose row in `groups` is older than their sessions: a note for each change, until the feed looks again."""

_members = sessions.alias("members")

is_finished: ColumnElement[bool] = and_(
    sessions.c.status == "closed",
    or_(sessions.c.reward.is_not(None), sessions.c.failed.is_not(None)),
    ~exists().where(
        _members.c.root_id == sessions.c.session_id,
        or_(
            _members.c.status == "open",
            and_(
                _members.c.status == "closed",
                sessions.c.reward.is_not(None),
                _members.c.reward.is_distinct_from(sessions.c.reward),
            ),
        ),
    ),
)
"""Condition on roots: the rollout is finished."""

_note = insert(group_changes)


def note(tx: Tx, keys: Sequence[GroupKey]) -> None:
    """Note that sessions of these groups have changed."""
    tx.insert(_note, [key._asdict() for key in keys])


_of_run = groups.c.run == bindparam("of_run")
_lock_run = select(groups.c.group_id).where(_of_run).order_by(groups.c.group_id).with_for_update()
_forget = delete(groups).where(_of_run)
_forget_notes = delete(group_changes).where(group_changes.c.run == bindparam("of_run"))


def forget(tx: Tx, run: str) -> None:
    """The run is erased: whoever has its name next has groups of its own."""
    given = {"of_run": run}
    tx.all(_lock_run, given)  # in the order in which all lock them: a deletion has none
    tx.run(_forget, given)
    tx.run(_forget_notes, given)


def join(points: StorePoints) -> None:
    points.changed.append(note)
    points.run_erased.append(forget)
