"""What the store writes for limits: a claim reserves, a commit counts, and both go with the turn's own rows.

    open_turns.reserved     what a turn in flight may sample; it is given back with the claim, however that ends
    sessions.spent_…        what a session has used

A rollout has used the sum over its sessions. A claim holds the root's row while it adds that up, so of two claims one
sees the other. A commit needs no such lock: it turns what was reserved into what is spent, which is not more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from sqlalchemy import (
    BigInteger,
    Connection,
    Executable,
    Integer,
    Text,
    bindparam,
    func,
    or_,
    select,
    union_all,
    update,
)

from app.crash_points import reach
from app.domain.events import LimitName, LimitReached, Limits, SessionRestored
from app.features.budgets.rules import NoneLeft, Used, allowance
from app.store import statements as sql
from app.store.batch import DEFERRED, Deferred
from app.store.dialect import ForEach, Tx
from app.store.log import Appended, BaseOperation, Refused, abandon, advance_head, refused
from app.store.log_turns import Busy, Claim, Commit, Limited, Pinned, Release, Stale, TooMany, holders_of
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
_spend = ForEach(
    lambda given: (
        update(sessions)
        .where(sessions.c.session_id == given.sid)
        .values(
            spent_turns=sessions.c.spent_turns + given.turned,
            spent_tokens=sessions.c.spent_tokens + given.sampled,
        )
        .returning(sessions.c.session_id)
    ),
    sid=Text,
    turned=Integer,
    sampled=BigInteger,
)


class Budget(msgspec.Struct, frozen=True):
    """The limits of session `session_id`."""

    session_id: str
    limits: Limits

    @property
    def per_rollout(self) -> bool:
        return self.limits.per == "rollout"


Verdict = int | Limited | Busy | TooMany | Stale | Refused | Deferred


class BudgetClaim(Claim, frozen=True):
    """A claim that reserves at most `wanted` tokens of `budgets`; None: all that is left.

    `reached` is a limit that stands in the way already. On PostgreSQL it waits for no row: where the root of its
    rollout is locked it is tried again later.
    """

    budgets: Sequence[Budget] = ()
    wanted: int | None = None
    reached: LimitName | None = None

    @classmethod
    def apply_set(cls, tx: Tx, operations: Sequence[BudgetClaim]) -> list[Any]:  # type: ignore[override]
        used: dict[Budget, Used] = {}
        outcomes: dict[str, Any] = {}
        reserving: list[BudgetClaim] = []
        for claim in operations:
            verdict = claim._reserve(tx, used)
            if isinstance(verdict, int):
                event = msgspec.structs.replace(claim.event, reserved=verdict)
                reserving.append(msgspec.structs.replace(claim, event=event))
            else:
                outcomes[claim.session_id] = verdict
        ids = [claim.session_id for claim in reserving]
        outcomes |= zip(ids, Claim.apply_set(tx, reserving) if reserving else (), strict=True)
        return [outcomes[claim.session_id] for claim in operations]

    def _reserve(self, tx: Tx, used: dict[Budget, Used]) -> Verdict:
        """How many tokens the turn may sample. `used` is what this transaction knows, with what it has reserved; what
        is not won after all is too much, and nobody sees it but the later claims of the same transaction."""
        if self.reached is not None:
            return self._stopped(tx, NoneLeft(self.reached, is_reserved=False))
        for budget in self.budgets:
            if budget not in used:
                named = {"of": budget.session_id}
                if tx.is_remote and budget.per_rollout and tx.one(_lock_if_free, named) is None:
                    return DEFERRED
                row = tx.one(USED[budget.per_rollout], named)
                assert row is not None
                used[budget] = Used(*map(int, row))
        reserved = allowance([(budget.limits, used[budget]) for budget in self.budgets], self.wanted)
        if isinstance(reserved, NoneLeft):
            return self._stopped(tx, reserved)
        for budget in self.budgets:
            used[budget] = used[budget].with_turn(reserved)
        return reserved

    def _stopped(self, tx: Tx, none: NoneLeft) -> Verdict:
        """The claim cannot be taken. What the request repeats comes first, in the log or in flight."""
        if (busy := self._repeated(tx)) is not None:
            return busy
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] != "open" or head[2] >= self.most or head[4] != self.known.turns:
            return self._failure(tx)
        if not none.is_reserved:
            return Limited(none.limit)
        in_flight: dict[tuple[str, int], bool] = {}
        for budget in self.budgets:
            named = {"of": budget.session_id, "lease_s": self.lease_s}
            in_flight |= {(row[0], row[1]): row[2] for row in tx.all(_IN_FLIGHT[budget.per_rollout], named)}
        if self._abandon_dead(tx, sorted({session_id for (session_id, _), dead in in_flight.items() if dead})):
            return Stale()
        if not in_flight:  # Claims of this transaction have reserved it, which may not be won: look again behind it.
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

    @classmethod
    def apply_set(cls, tx: Tx, operations: Sequence[Commit]) -> list[Appended | Stale | Pinned | Refused]:
        outcomes = Commit.apply_set(tx, operations)
        tx.each(
            _spend,
            [
                {"sid": commit.session_id, "turned": 1, "sampled": commit.turn.output_tokens}
                for commit, outcome in zip(operations, outcomes, strict=True)
                if isinstance(outcome, Appended)
            ],
        )
        reach("in_spent")
        return outcomes


class EndAtLimit(Release, frozen=True):
    """End a turn whose generation ran into a limit. `sampled` tokens of it count as used."""

    durable: ClassVar[bool] = True
    runs_inline: ClassVar[bool] = False
    sampled: int = 0

    def apply(self, tx: Tx) -> Appended | Refused:
        outcome = Release.apply(self, tx)
        if isinstance(outcome, Appended):
            tx.each(_spend, [{"sid": self.session_id, "turned": 0, "sampled": self.sampled}])
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
        head = tx.one(sql.head, {"sid": self.session_id})
        if head is None or head[1] != "open":
            return refused(tx, self.session_id)
        if tx.one(_limit_since, {"sid": self.session_id, "known": self.known}) is not None:
            return Stale()
        noted = advance_head(tx, self.session_id, self.at, [self.event])
        reach("in_limit_noted")
        return noted


def read_used(connection: Connection, budget: Budget) -> Used:
    row = connection.execute(USED[budget.per_rollout], {"of": budget.session_id}).one()
    return Used(*map(int, row))
