"""Groups of sessions: which the training feed hands out, to which consumer, and which are acknowledged.

    session changes ──▶ note in `group_changes`, same transaction
    feed is asked   ──▶ Settle: notes become rows of `groups` ──▶ Lease ──▶ rows leave ──▶ Acknowledge

A session's transaction only adds a note. If it changed the group's row, two processes' batches could deadlock, and each
reward would read the whole group. A note becomes visible together with its session's change, so settling it counts that
change. `Settle`, `Lease` and `Acknowledge` lock only rows of `groups`, in the order of their keys, so they cannot
deadlock either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from sqlalchemy import Boolean, and_, bindparam, case, delete, insert, or_, select, update

from app.domain.groups import GroupKey
from app.features.groups.reads import ATTEMPT, IS_ROLLOUT, Candidate, attempt_of, is_free
from app.features.groups.rules import in_order, outcome
from app.features.groups.schema import group_changes, groups
from app.store import pins
from app.store.dialect import Tx
from app.store.dialect import now as database_now
from app.store.log import BaseOperation
from app.store.schema import sessions

# Settling.

_notes = (
    delete(group_changes)
    .where(
        group_changes.c.id.in_(
            select(group_changes.c.id).order_by(group_changes.c.id).limit(bindparam("most")).with_for_update()
        )
    )
    .returning(group_changes.c.run, group_changes.c.group_id)
)
_of_group = and_(groups.c.run == bindparam("of_run"), groups.c.group_id == bindparam("gid"))
_notes_of_group = delete(group_changes).where(
    group_changes.c.run == bindparam("of_run"), group_changes.c.group_id == bindparam("gid")
)
_locked = (
    select(groups.c.sessions, groups.c.completed_at, groups.c.measured, groups.c.erased)
    .where(_of_group)
    .with_for_update()
)
_insert_group = insert(groups)
_named = and_(sessions.c.run == bindparam("of_run"), sessions.c.group_id == bindparam("gid"))
_rollouts = select(*ATTEMPT).where(_named, IS_ROLLOUT)
_settle = (
    update(groups)
    .where(_of_group)
    .values(
        sessions=bindparam("present"),
        erased=bindparam("gone"),
        unfinished=bindparam("lacking"),
        arrived=bindparam("there"),
        size=bindparam("waits_for", type_=groups.c.size.type),
        completed_at=bindparam("complete_since"),
        measured=bindparam("still_measured"),
        evaluation=bindparam("of_evaluations", type_=Boolean),
        lease_until=case((bindparam("complete", type_=Boolean), groups.c.lease_until), else_=None),
    )
)


class Settle(BaseOperation, frozen=True):
    """Update the rows of groups from their sessions, for up to `most` notes. True while there may be more.

    A complete group in which a new rollout begins loses its lease; its consumer may still acknowledge what it got. Not
    durable: a power cut restores the notes too.
    """

    durable: ClassVar[bool] = False
    most: int

    @property
    def size(self) -> int:
        return 256 * self.most

    def apply(self, tx: Tx) -> bool:
        pins.keep(tx)
        notes = tx.all(_notes, {"most": self.most})
        for key in sorted({GroupKey(*row) for row in notes}):
            _settle_group(tx, key)
        return len(notes) == self.most


class SettleGroup(BaseOperation, frozen=True):
    """As `Settle`, for one group and all its notes."""

    durable: ClassVar[bool] = False
    key: GroupKey

    def apply(self, tx: Tx) -> None:
        pins.keep(tx)
        tx.run(_notes_of_group, _given(self.key))
        _settle_group(tx, self.key)


def _settle_group(tx: Tx, key: GroupKey) -> None:
    known = tx.one(_locked, _given(key))
    if known is None:
        counts = dict.fromkeys(("sessions", "erased", "unfinished", "arrived", "handed_out"), 0)
        tx.insert(_insert_group, [{**key._asdict(), **counts, "measured": False}])
        known = (0, None, False, 0)
    now = outcome(in_order(attempt_of(row) for row in tx.all(_rollouts, _given(key))))
    since = (now.changed_at if known[1] is None else known[1]) if now.complete else None
    is_same = known[0] == now.rollouts and known[3] == now.erased
    tx.run(
        _settle,
        {
            **_given(key),
            "present": now.rollouts,
            "gone": now.erased,
            "lacking": now.unfinished,
            "there": now.arrived,
            "waits_for": now.size,
            "complete_since": since,
            "complete": now.complete,
            "of_evaluations": now.evaluation,
            "still_measured": bool(known[2]) and now.complete and is_same,
        },
    )


def _given(key: GroupKey) -> dict[str, str]:
    return {"of_run": key.run, "gid": key.group_id}


# Leasing.


class Leased(msgspec.Struct, frozen=True):
    """`lease_until` is in seconds since the epoch by the database's clock; `handed_out` includes this time."""

    key: GroupKey
    lease_until: float
    handed_out: int


_lease = (
    update(groups)
    .where(
        _of_group,
        groups.c.acked_at.is_(None),
        groups.c.completed_at == bindparam("seen_at"),
        groups.c.sessions == bindparam("seen_sessions"),
        or_(is_free, and_(groups.c.consumer == bindparam("who"), bindparam("own_too", type_=Boolean))),
    )
    .values(
        consumer=bindparam("who", type_=groups.c.consumer.type),
        lease_until=database_now() + bindparam("lease_s"),
        handed_out=groups.c.handed_out + 1,
        measured=True,
        oldest_version=bindparam("oldest"),
    )
    .returning(groups.c.lease_until, groups.c.handed_out)
)


class Lease(BaseOperation, frozen=True):
    """Lease the groups that have not changed since the caller measured them and that nobody else holds.

    `own_too`: also those that the consumer itself holds. None of a run that is being taken back to a checkpoint.
    """

    consumer: str
    lease_s: float
    own_too: bool
    wanted: Sequence[Candidate]

    @property
    def size(self) -> int:
        return 256 * len(self.wanted)

    def apply(self, tx: Tx) -> list[Leased]:
        leased: list[Leased] = []
        restoring = {run for run in {group.key.run for group in self.wanted} if pins.is_restoring(tx, run)}
        for group in sorted(self.wanted, key=lambda group: group.key):
            if group.key.run in restoring:
                continue
            row = tx.one(
                _lease,
                {
                    **_given(group.key),
                    "seen_at": group.completed_at,
                    "seen_sessions": group.sessions,
                    "who": self.consumer,
                    "own_too": self.own_too,
                    "lease_s": self.lease_s,
                    "oldest": group.oldest_version,
                },
            )
            if row is not None:
                leased.append(Leased(group.key, row[0], row[1]))
        return leased


_measure = (
    update(groups)
    .where(
        _of_group,
        groups.c.completed_at == bindparam("seen_at"),
        groups.c.sessions == bindparam("seen_sessions"),
    )
    .values(measured=True, oldest_version=bindparam("oldest"))
)


class Measure(BaseOperation, frozen=True):
    """Store the age of groups that were not handed out, so that the next request need not read their logs."""

    durable: ClassVar[bool] = False
    found: Sequence[Candidate]

    def apply(self, tx: Tx) -> None:
        for group in sorted(self.found, key=lambda group: group.key):
            row = {**_given(group.key), "seen_at": group.completed_at, "seen_sessions": group.sessions}
            tx.run(_measure, {**row, "oldest": group.oldest_version})


# Acknowledging.

_acknowledge = (
    update(groups)
    .where(
        _of_group,
        groups.c.consumer == bindparam("who"),
        groups.c.acked_at.is_(None),
    )
    .values(acked_at=database_now())
)
_consumer_of = select(groups.c.consumer, groups.c.acked_at).where(_of_group)
_any_session = select(sessions.c.session_id).where(_named).limit(1)


class Acknowledged(msgspec.Struct, frozen=True):
    """The outcome for each group: consumed now, consumed before, not leased to this consumer, unknown."""

    acknowledged: list[str]
    already: list[str]
    not_leased: list[str]
    unknown: list[str]


class Acknowledge(BaseOperation, frozen=True):
    """Mark groups of a run as consumed, also after their lease has ended, unless another consumer got them.

    None while the run is being taken back to a checkpoint: nothing is acknowledged then.
    """

    consumer: str
    run: str
    group_ids: Sequence[str]

    @property
    def size(self) -> int:
        return 256 * len(self.group_ids)

    def apply(self, tx: Tx) -> Acknowledged | None:
        if pins.is_restoring(tx, self.run):
            return None
        outcome = Acknowledged([], [], [], [])
        for group_id in sorted(set(self.group_ids)):
            given = _given(GroupKey(self.run, group_id))
            if tx.run(_acknowledge, {**given, "who": self.consumer}):
                outcome.acknowledged.append(group_id)
                continue
            row = tx.one(_consumer_of, given)
            if row is None and tx.one(_any_session, given) is None:
                outcome.unknown.append(group_id)
            elif row is not None and row[0] == self.consumer and row[1] is not None:
                outcome.already.append(group_id)
            else:
                outcome.not_leased.append(group_id)
        return outcome
