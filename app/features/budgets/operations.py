"""What the store writes for limits: a claim reserves, a commit counts, and both go with the turn's own rows.

    open_turns.reserved     what a turn in flight may sample; it is given back with the claim, however that ends
    sessions.spent_…        what a session has used

A rollout has used the sum over its sessions. A claim holds the root's row while it adds that up, so of two claims one
sees the other. A commit needs no such lock: it turns what was reserved into what is spent, which is not more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from sqlalchemy import BigInteger, Connection, Executable, bindparam, func, or_, select, union_all, update

from app.crash_points import reach
from app.domain.events import LimitName, LimitReached, Limits, SessionRestored
from app.features.budgets.rules import NoneLeft, Used, allowance
from app.store import statements as sql
from app.store.dialect import Tx
from app.store.log import DEFERRED, Appended, BaseOperation, Deferred, Note, Refused, abandon, holders_of
from app.store.log_turns import Claim, ClaimRefused, Commit, Limited, Release, Seen, Stale
from app.store.schema import SESSION_ID, events, open_turns, sessions

_of = bindparam("of", type_=SESSION_ID)
_columns = (sessions.c.session_id, sessions.c.spent_turns, sessions.c.spent_tokens)
_alone = select(*_columns).where(sessions.c.session_id == _of)
_members = select(*_columns).where(sessions.c.root_id == _of, sessions.c.root_id.is_not(None))
_COUNTED = {True: union_all(_alone, _members), False: _alone}
"""The sessions that a budget counts, by whether it is a rollout's."""


def _used(per_rollout: bool) -> Executable:
    """One statement sees one moment: a commit moves tokens from one of these sums to the other."""
    counted = _COUNTED[per_rollout].cte("counted")
    in_flight = open_turns.c.session_id.in_(select(counted.c.session_id)) & open_turns.c.reserved.is_not(None)
    return select(
        select(func.coalesce(func.sum(counted.c.spent_turns), 0)).scalar_subquery(),
        select(func.coalesce(func.sum(counted.c.spent_tokens), 0)).scalar_subquery(),
        select(func.count()).select_from(open_turns).where(in_flight).scalar_subquery(),
        select(func.coalesce(func.sum(open_turns.c.reserved), 0)).where(in_flight).scalar_subquery(),
    )


def _in_flight(per_rollout: bool) -> Executable:
    """The sessions that have turns in flight, and the processes that hold these."""
    counted = _COUNTED[per_rollout].cte("counted")
    of_budget = open_turns.c.session_id.in_(select(counted.c.session_id)) & open_turns.c.reserved.is_not(None)
    columns = open_turns.c.session_id, open_turns.c.incarnation, sql.holder_is_dead.label("dead")
    return select(*columns).select_from(sql.holders).where(of_budget).distinct()


USED = {per_rollout: _used(per_rollout) for per_rollout in _COUNTED}
_IN_FLIGHT = {per_rollout: _in_flight(per_rollout) for per_rollout in _COUNTED}
_lock_if_free = select(sessions.c.session_id).where(sessions.c.session_id == _of).with_for_update(skip_locked=True)
_spend = (
    update(sessions)
    .where(sql.of_session(sessions))
    .values(
        spent_turns=sessions.c.spent_turns + bindparam("turned"),
        spent_tokens=sessions.c.spent_tokens + bindparam("sampled"),
    )
)


class Budget(msgspec.Struct, frozen=True):
    """The limits of session `session_id`."""

    session_id: str
    limits: Limits

    @property
    def per_rollout(self) -> bool:
        return self.limits.per == "rollout"


class BudgetClaim(Claim, frozen=True):
    """A claim that reserves at most `wanted` tokens of `budgets`; None: all that is left.

    `reached` is a limit that stands in the way already. On PostgreSQL it waits for no row: where the root of its
    rollout is locked it is tried again later.
    """

    budgets: Sequence[Budget] = ()
    wanted: int | None = None
    reached: LimitName | None = None

    def decide(self, tx: Tx, seen: Seen | None) -> Claim | ClaimRefused | Deferred:
        """What the request repeats comes first, in the log or in flight."""
        claim = super().decide(tx, seen)
        if not isinstance(claim, Claim):
            return claim
        if self.reached is not None:
            return Limited(self.reached)
        used: list[tuple[Limits, Used]] = []
        for budget in self.budgets:
            named = {"of": budget.session_id}
            if tx.is_remote and budget.per_rollout and tx.one(_lock_if_free, named) is None:
                return DEFERRED
            row = tx.one(USED[budget.per_rollout], named)
            assert row is not None
            used.append((budget.limits, Used(*map(int, row))))
        reserved = allowance(used, self.wanted)
        if isinstance(reserved, NoneLeft):
            return self._stopped(tx, reserved)
        event = msgspec.structs.replace(claim.event, reserved=reserved)
        return msgspec.structs.replace(claim, event=event)

    def _stopped(self, tx: Tx, none: NoneLeft) -> Limited | Stale:
        if not none.is_reserved:
            return Limited(none.limit)
        in_flight: dict[tuple[str, int], bool] = {}
        for budget in self.budgets:
            named = {"of": budget.session_id, "lease_s": self.lease_s}
            in_flight |= {(row[0], row[1]): row[2] for row in tx.all(_IN_FLIGHT[budget.per_rollout], named)}
        if self._abandon_dead(tx, sorted({session_id for (session_id, _), dead in in_flight.items() if dead})):
            return Stale()
        if not in_flight:  # On PostgreSQL they may have ended between the two statements.
            return Stale()
        return Limited(none.limit, frozenset(incarnation for _, incarnation in in_flight))

    def _abandon_dead(self, tx: Tx, session_ids: Sequence[str]) -> bool:
        """Give back what dead processes have reserved, but in sessions that another transaction has locked."""
        abandoned = False
        for session_id in session_ids:
            if tx.is_remote and tx.one(_lock_if_free, {"of": session_id}) is None:
                continue
            dead = [holder for holder in holders_of(tx, session_id, self.lease_s) if holder.is_dead]
            abandoned = bool(abandon(tx, session_id, self.at, dead, "owner_dead").events) or abandoned
        return abandoned


class BudgetCommit(Commit, frozen=True):
    """A commit that counts its turn and the tokens that this has sampled."""

    def also(self, tx: Tx) -> None:
        tx.run(_spend, {"sid": self.session_id, "turned": 1, "sampled": self.turn.output_tokens})
        reach("in_spent")


class EndAtLimit(Release, frozen=True):
    """End a turn whose generation ran into a limit. `sampled` tokens of it count as used."""

    durable: ClassVar[bool] = True
    runs_inline: ClassVar[bool] = False
    sampled: int = 0

    def apply(self, tx: Tx) -> Appended | Refused:
        outcome = Release.apply(self, tx)
        if isinstance(outcome, Appended):
            tx.run(_spend, {"sid": self.session_id, "turned": 0, "sampled": self.sampled})
        reach("in_spent")
        return outcome


_limit_since = (
    select(events.c.seq)
    .where(
        sql.of_session(events),
        events.c.seq > bindparam("known", type_=BigInteger),
        or_(events.c.type == LimitReached.__name__, events.c.type == SessionRestored.__name__),
    )
    .limit(1)
)


class NoteLimit(BaseOperation, frozen=True):
    """Write down that a limit has refused a request of an open session. Stale, and nothing is written, if behind event
    `known` the log says of a limit already, or of a restore: the same may be noted."""

    session_id: str
    at: float
    event: LimitReached
    known: int

    def apply(self, tx: Tx) -> Appended | Stale | Refused:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        if tx.one(_limit_since, {"sid": self.session_id, "known": self.known}) is not None:
            return Stale()
        outcome = Note(self.session_id, self.at, self.event).apply(tx)
        reach("in_limit_noted")
        return outcome


def read_used(connection: Connection, budget: Budget) -> Used:
    row = connection.execute(USED[budget.per_rollout], {"of": budget.session_id}).one()
    return Used(*map(int, row))
