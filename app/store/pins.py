"""What checkpoints keep: a session that is in one is neither freed nor erased, except by a client.

A transaction that drops content keeps the pins until it ends, and looks at them after that. A checkpoint is made only
between such transactions. So one that is made later finds the content gone, and one that was made before is seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, FromClause, Text, exists, func, select

from app.store.dialect import ForEach, Tx, change_pins, keep_pins
from app.store.schema import checkpoint_sessions, checkpoints, sessions

_keep = select(keep_pins())
_change = select(change_pins())


_each = ForEach(
    lambda given: (
        select(checkpoint_sessions.c.session_id, func.max(checkpoint_sessions.c.seq))
        .join_from(checkpoint_sessions, checkpoints, checkpoints.c.id == checkpoint_sessions.c.checkpoint_id)
        .where(checkpoint_sessions.c.session_id == given.sid, checkpoints.c.state != "deleting")
        .group_by(checkpoint_sessions.c.session_id)
    ),
    sid=Text,
)
_restoring = select(checkpoints.c.name).where(checkpoints.c.state == "restoring").limit(1)


def keep(tx: Tx) -> None:
    """No checkpoint is made until the transaction ends."""
    tx.one(_keep, {})


def change(tx: Tx) -> None:
    """Nothing is freed or erased, and no group is leased or acknowledged, until the transaction ends."""
    tx.one(_change, {})


def pinned_upto(tx: Tx, session_id: str) -> int:
    """The last event of the session that is in a checkpoint; 0: it is in none. The pins are kept."""
    return pinned_upto_each(tx, [session_id]).get(session_id, 0)


def pinned_upto_each(tx: Tx, session_ids: Sequence[str]) -> dict[str, int]:
    """As `pinned_upto`, of those of the sessions that are in a checkpoint."""
    keep(tx)
    return {row[0]: row[1] for row in tx.each(_each, [{"sid": session_id} for session_id in session_ids])}


def read_pinned_upto(connection: Connection, session_id: str) -> int:
    """As `pinned_upto`, of what is committed."""
    row = connection.execute(_each.single, {"sid": session_id}).first()
    return 0 if row is None else row[1]


def is_pinned(heads: FromClause = sessions) -> ColumnElement[bool]:
    """Condition on heads: the session is in a checkpoint."""
    return exists().where(
        checkpoint_sessions.c.session_id == heads.c.session_id,
        checkpoints.c.id == checkpoint_sessions.c.checkpoint_id,
        checkpoints.c.state != "deleting",
    )


def is_restoring(tx: Tx) -> bool:
    """Is the store being taken back to a checkpoint? The pins are kept: the answer holds until the transaction ends."""
    keep(tx)
    return tx.one(_restoring, {}) is not None
