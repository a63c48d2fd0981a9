"""Applies many operations in one transaction: those of one kind as a set, if they are on different sessions.

A set's results tell which operations succeeded; only those rows are inserted, all rows of a table at once. All other
operations, and those on a session that has several, are applied one by one afterwards, in their order.

On PostgreSQL all heads are locked first, without waiting. An operation on a head that another transaction has locked is
`DEFERRED` to a later batch. So no session waits for another's row, and two batches cannot deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ARRAY, String, any_, bindparam, select

from app.store.dialect import Tx
from app.store.log import Operation, SetOperation
from app.store.schema import sessions


class Deferred:
    """The outcome of an operation that was not tried: another transaction has locked its session's row."""


DEFERRED = Deferred()

_known = select(sessions.c.session_id).where(sessions.c.session_id == any_(bindparam("sids", type_=ARRAY(String))))
_lock_heads = _known.order_by(sessions.c.session_id).with_for_update(skip_locked=True)


def apply_all(tx: Tx, operations: Sequence[Operation[Any]]) -> list[Any]:
    """The outcomes in the same order. An operation without a session runs alone."""
    if len(operations) == 1 and not tx.is_remote:
        return [operations[0].apply(tx)]
    deferred = _lock(tx, operations) if tx.is_remote and operations[0].session_id else set()
    outcomes: dict[int, Any] = {
        place: DEFERRED for place, operation in enumerate(operations) if operation.session_id in deferred
    }
    counts = Counter(operation.session_id for operation in operations)
    sets: dict[type[SetOperation], list[int]] = {}
    for place, operation in enumerate(operations):
        is_single = counts[operation.session_id] == 1 and place not in outcomes
        if is_single and isinstance(operation, SetOperation) and operation.is_of_set:
            sets.setdefault(type(operation), []).append(place)
    for kind, places in sets.items():
        outcomes |= zip(places, kind.apply_set(tx, [operations[place] for place in places]), strict=True)
    for place, operation in enumerate(operations):
        if place not in outcomes:
            outcomes[place] = operation.apply(tx)
    return [outcomes[place] for place in range(len(operations))]


def _lock(tx: Tx, operations: Sequence[Operation[Any]]) -> set[str]:
    """Lock the heads of the operations' sessions; returns those that another transaction has locked."""
    ids = sorted({operation.session_id for operation in operations})
    locked = {row[0] for row in tx.all(_lock_heads, {"sids": ids})}
    tx.has_locked(locked)
    missing = [session_id for session_id in ids if session_id not in locked]
    return {row[0] for row in tx.all(_known, {"sids": missing})} if missing else set()
