"""Applies many operations in one transaction: one by one, or in sets where each statement is a round trip.

On SQLite a statement takes microseconds, and operations are applied one by one. On PostgreSQL one UPDATE takes all
claims of a batch; one DELETE and one UPDATE do all commits. Their results tell which operations succeeded; only those
rows are inserted, all rows of a table at once. All other operations, and a second operation on the same session, are
applied one by one afterwards.

All heads are locked first, without waiting. An operation on a head that another transaction has locked is `DEFERRED` to
a later batch. So no session waits for another's row, and two batches cannot deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Double,
    String,
    TableValuedAlias,
    Text,
    any_,
    bindparam,
    column,
    delete,
    func,
    insert,
    select,
    update,
)

from app.crash_points import reach
from app.domain.events import Event
from app.store import pins, staged_tokens
from app.store import statements as sql
from app.store.dialect import Tx
from app.store.log import Appended, Operation, append_all, refused, tombstone
from app.store.log_sessions import Create
from app.store.log_turns import Claim, Commit, Pinned
from app.store.rollouts import note_adopted
from app.store.schema import archived, group_changes, open_turns, sessions

Kind = TypeVar("Kind", bound=Operation[Any])


class Deferred:
    """The outcome of an operation that was not tried: another transaction has locked its session's row."""


DEFERRED = Deferred()


def apply_all(tx: Tx, operations: Sequence[Operation[Any]]) -> list[Any]:
    """The outcomes in the same order. An operation without a session runs alone."""
    if not tx.is_remote or not operations[0].session_id:
        return [operation.apply(tx) for operation in operations]
    return _Batch(tx, operations).run()


class _Batch:
    def __init__(self, tx: Tx, operations: Sequence[Operation[Any]]) -> None:
        self._tx = tx
        self._operations = operations
        self._outcomes: dict[int, Any] = {}
        counts = Counter(operation.session_id for operation in operations)
        self._single = {session_id for session_id, count in counts.items() if count == 1}

    def run(self) -> list[Any]:
        tx = self._tx
        ids = sorted({operation.session_id for operation in self._operations})
        locked = {row[0] for row in tx.all(_lock_heads, {"sids": ids})}
        tx.has_locked(locked)
        missing = [session_id for session_id in ids if session_id not in locked]
        locked_elsewhere = {row[0] for row in tx.all(_known, {"sids": missing})} if missing else set()
        for place, operation in enumerate(self._operations):
            if operation.session_id in locked_elsewhere:
                self._outcomes[place] = DEFERRED
        creates = any(isinstance(operation, Create) for operation in self._operations)
        gone = {row[0] for row in tx.all(_archived, {"sids": missing})} if missing and creates else set()
        known = locked | gone
        self._apply_kind(Create, lambda one: one.session_id not in known and one.parent is None, self._create)
        self._apply_kind(Claim, lambda one: one.tree is None, self._claim)
        self._apply_kind(Commit, lambda one: not (one.staged or one.decided_at or one.opened_at), self._commit)
        for place, operation in enumerate(self._operations):
            if place not in self._outcomes:
                self._outcomes[place] = operation.apply(tx)
        return [self._outcomes[place] for place in range(len(self._operations))]

    def _apply_kind(
        self, kind: type[Kind], fits: Callable[[Kind], bool], apply: Callable[[list[tuple[int, Kind]]], None]
    ) -> None:
        """Apply the operations of a kind that are the only ones of their sessions."""
        found = [
            (place, operation)
            for place, operation in enumerate(self._operations)
            if isinstance(operation, kind)
            and place not in self._outcomes
            and operation.session_id in self._single
            and fits(operation)
        ]
        if found:
            apply(found)

    def _create(self, creates: list[tuple[int, Create]]) -> None:
        """Insert new sessions. If another process creates one at this moment, the keys conflict.

        Sessions with a parent are created one by one afterwards: their parents may be among these.
        """
        tx = self._tx
        tx.insert(sql.insert_session, [create.head_row() for _, create in creates])
        noted = {create.group_id for _, create in creates if create.group_id is not None}
        tx.insert(_insert_note, [{"group_id": group_id} for group_id in sorted(noted)])
        created = {"sids": [create.session_id for _, create in creates]}
        adopted = [(row[0], row[1]) for row in tx.all(_adopted, created)]
        if adopted:
            tx.run(_note_adopted, created)
        tx.insert(sql.insert_blob, [row for _, create in creates for row in create.blob_rows()])
        self._append([(place, create.session_id, 1, create.at, [create.event]) for place, create in creates])
        for place, create in creates:
            own = tuple(session_id for root_id, session_id in adopted if root_id == create.session_id)
            self._outcomes[place] = Appended(self._outcomes[place].events, own)
        reach("in_create")

    def _claim(self, claims: list[tuple[int, Claim]]) -> None:
        tx = self._tx
        given = {
            "sids": [claim.session_id for _, claim in claims],
            "expected": [claim.expected for _, claim in claims],
            "last_events_at": [claim.last_event_at for _, claim in claims],
        }
        won = {row[0]: (row[1], row[2]) for row in tx.all(_claim_heads, given)}
        winners = [(place, claim, *won[claim.session_id]) for place, claim in claims if claim.session_id in won]
        tx.insert(sql.insert_open_turn, [claim.open_row(fence, number) for _, claim, fence, number in winners])
        self._append(
            [
                (place, claim.session_id, fence, claim.at, [claim.opened(number)])
                for place, claim, fence, number in winners
            ]
        )
        reach("in_claim")
        for place, claim in claims:
            if claim.session_id not in won:
                self._outcomes[place] = claim.failure(tx)

    def _commit(self, found: list[tuple[int, Commit]]) -> None:
        tx = self._tx
        commits = self._unpinned(found)
        given = {
            "sids": [commit.session_id for _, commit in commits],
            "fences": [commit.fence for _, commit in commits],
            "incarnations": [commit.incarnation for _, commit in commits],
        }
        won = {row[0] for row in tx.all(_free_open_turns, given)}
        winners = [(place, commit) for place, commit in commits if commit.session_id in won]
        tx.insert(sql.insert_turn, [commit.turn_row() for _, commit in winners])
        tx.insert(sql.insert_blob, [row for _, commit in winners for row in commit.blob_rows()])
        tx.insert(sql.insert_chunk, [row for _, commit in winners for row in commit.chunk_rows()])
        staged_tokens.drop_of_sessions(tx, [commit.session_id for _, commit in winners if commit.stages])
        versions = self._advance([commit for _, commit in winners])
        self._append(
            [
                (
                    place,
                    commit.session_id,
                    versions[commit.session_id] - len(commit.events) + 1,
                    commit.at,
                    commit.events,
                )
                for place, commit in winners
            ]
        )
        for place, commit in commits:
            if commit.session_id in won:
                tombstone(tx, commit.session_id, self._outcomes[place])
            else:
                self._outcomes[place] = refused(tx, commit.session_id)
        reach("in_commit")

    def _unpinned(self, commits: list[tuple[int, Commit]]) -> list[tuple[int, Commit]]:
        """Those whose tombstones spare what checkpoints have."""
        sids = [commit.session_id for _, commit in commits if commit.has_tombstones]
        if not sids:
            return commits
        pins.keep(self._tx)
        upto = {row[0]: row[1] for row in self._tx.all(_pinned_upto, {"sids": sids})}
        late = {place for place, commit in commits if upto.get(commit.session_id, 0) > commit.pinned_upto}
        self._outcomes |= {place: Pinned(upto[commit.session_id]) for place, commit in commits if place in late}
        return [(place, commit) for place, commit in commits if place not in late]

    def _advance(self, commits: list[Commit]) -> dict[str, int]:
        """Advance the heads of committed turns; their new versions by session."""
        if not commits:
            return {}
        given = {
            "sids": [commit.session_id for commit in commits],
            "counts": [len(commit.events) for commit in commits],
            "ats": [commit.at for commit in commits],
            "weights": [commit.weight for commit in commits],
            "engines": [commit.turn.engine for commit in commits],
        }
        return {row[0]: row[1] for row in self._tx.all(_advance_heads, given)}

    def _append(self, logs: list[tuple[int, str, int, float, Sequence[Event]]]) -> None:
        """For each operation: its index, the session, the first event's seq, the time, and the events."""
        appended = append_all(self._tx, [log[1:] for log in logs])
        self._outcomes |= {log[0]: outcome for log, outcome in zip(logs, appended, strict=True)}


def _given(**types: tuple[str, Any]) -> TableValuedAlias:
    """Parameters that are lists of equal length, as a table: parameter and type by column."""
    lists = [bindparam(name, type_=ARRAY(kind)) for name, kind in types.values()]
    return func.unnest(*lists).table_valued(*(column(name) for name in types), name="given").render_derived()


_known = select(sessions.c.session_id).where(sessions.c.session_id == any_(bindparam("sids", type_=ARRAY(String))))
_lock_heads = _known.order_by(sessions.c.session_id).with_for_update(skip_locked=True)

_claims = _given(sid=("sids", Text), expected=("expected", BigInteger), last_event_at=("last_events_at", Double))
_claim_heads = (
    update(sessions)
    .where(
        sessions.c.session_id == _claims.c.sid,
        *sql.claimable(_claims.c.expected, _claims.c.last_event_at),
    )
    .values(sql.opened_values)
    .returning(sessions.c.session_id, sessions.c.version, sessions.c.last_turn)
)

_held = _given(sid=("sids", Text), fence=("fences", BigInteger), incarnation=("incarnations", BigInteger))
_free_open_turns = (
    delete(open_turns)
    .where(
        open_turns.c.session_id == _held.c.sid,
        open_turns.c.fence == _held.c.fence,
        open_turns.c.incarnation == _held.c.incarnation,
    )
    .returning(open_turns.c.session_id)
)

_moved = _given(
    sid=("sids", Text),
    count=("counts", BigInteger),
    at=("ats", Double),
    weight=("weights", BigInteger),
    engine=("engines", Text),
)
_largest: ColumnElement[int] = func.greatest(sessions.c.weight_version, _moved.c.weight)
"""GREATEST ignores nulls."""
_advance_heads = (
    update(sessions)
    .where(sessions.c.session_id == _moved.c.sid)
    .values(
        version=sessions.c.version + _moved.c["count"],
        open_turns=sessions.c.open_turns - 1,
        turns=sessions.c.turns + 1,
        updated_at=_moved.c["at"],
        weight_version=_largest,
        engine=_moved.c.engine,
    )
    .returning(sessions.c.session_id, sessions.c.version)
)
_pinned_upto = pins.upto_of_each(any_(bindparam("sids", type_=ARRAY(String))))
_insert_note = insert(group_changes)
_archived = select(archived.c.session_id).where(
    archived.c.session_id == any_(bindparam("sids", type_=ARRAY(String))),
    archived.c.state != "writing",
    archived.c.state != "copy",
)
_note_adopted = note_adopted(any_(bindparam("sids", type_=ARRAY(String))))
_adopted = (
    select(sessions.c.root_id, sessions.c.session_id)
    .where(sessions.c.root_id == any_(bindparam("sids", type_=ARRAY(String))), sessions.c.root_id.is_not(None))
    .order_by(sessions.c.session_id)
)
