"""Applies many operations in one transaction.

    claims and commits    of a session that is as their process knows it: a few statements for all of them
    the other ones        behind one look at all their sessions, by the same statements
    creations             as a set, where they are of different sessions
    all others            one by one, in their order

On PostgreSQL a head is locked without waiting, before anything else of its session. An operation on a head that another
transaction has locked is `DEFERRED` to a later batch. So no session waits for another's row, and two batches cannot
deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ARRAY, String, any_, bindparam, select

from app.store.dialect import Tx
from app.store.log import Operation
from app.store.log_sessions import Create
from app.store.log_turns import Claim, Commit, look_and_write, write
from app.store.schema import sessions


class Deferred:
    """The outcome of an operation that was not tried: another transaction has locked its session's row."""


DEFERRED = Deferred()

_known = select(sessions.c.session_id).where(sessions.c.session_id == any_(bindparam("sids", type_=ARRAY(String))))
_lock_heads = _known.order_by(sessions.c.session_id).with_for_update(skip_locked=True)


def apply_all(tx: Tx, operations: Sequence[Operation[Any]]) -> list[Any]:
    """The outcomes in the same order. An operation without a session runs alone."""
    ids = [operation.session_id for operation in operations]
    repeated: set[str] = set()
    if len(set(ids)) < len(ids):
        repeated = {session_id for session_id, count in Counter(ids).items() if count > 1}
    claims: list[Claim] = []
    commits: list[Commit] = []
    for operation in operations:
        if operation.session_id in repeated:
            continue
        if isinstance(operation, Commit):
            if not operation.needs_look:
                commits.append(operation)
        elif isinstance(operation, Claim) and not operation.needs_look:
            claims.append(operation)
    outcomes: dict[str, Any] = {}
    if claims or commits:
        outcomes.update(write(tx, claims, commits))
        if len(outcomes) == len(operations):
            return [outcomes[session_id] for session_id in ids]
    if tx.is_remote and ids[0]:
        outcomes |= dict.fromkeys(_locked_by_others(tx, set(ids) - outcomes.keys()), DEFERRED)
    others = [one for one in operations if one.session_id not in outcomes and one.session_id not in repeated]
    # A kind of claim that looks at other sessions too is decided when all before it is written.
    turns = [one for one in others if type(one) is Claim or isinstance(one, Commit)]
    if turns:
        outcomes |= look_and_write(tx, turns)
    creations = [one for one in others if isinstance(one, Create) and one.is_of_set]
    if creations:
        outcomes |= zip([one.session_id for one in creations], Create.apply_set(tx, creations), strict=True)
    return [outcomes[one.session_id] if one.session_id in outcomes else one.apply(tx) for one in operations]


def _locked_by_others(tx: Tx, session_ids: set[str]) -> set[str]:
    """Lock the heads of sessions; returns those that another transaction has locked."""
    ids = sorted(session_ids)
    locked = {row[0] for row in tx.all(_lock_heads, {"sids": ids})}
    tx.add_locked(locked)
    missing = [session_id for session_id in ids if session_id not in locked]
    return {row[0] for row in tx.all(_known, {"sids": missing})} if missing else set()
