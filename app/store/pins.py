"""What is kept of sessions (`StorePoints.pins`): it is neither freed nor erased, except by a client.

A transaction that drops content keeps the pins until it ends, and looks at them after that. Pins are made only between
such transactions. So one that is made later finds the content gone, and one that was made before is seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, FromClause, false, select

from app.store.dialect import StorePoints, Tx, change_pins, keep_pins
from app.store.schema import sessions

_keep = select(keep_pins())
_change = select(change_pins())


def keep(tx: Tx) -> None:
    """No pin is made until the transaction ends."""
    tx.one(_keep, {})


def change(tx: Tx) -> None:
    """Nothing is freed or erased, and no group is leased or acknowledged, until the transaction ends."""
    tx.one(_change, {})


def pinned_upto(tx: Tx, session_id: str) -> int:
    """The last event of the session that is pinned; 0: none is. The pins are kept."""
    return pinned_upto_each(tx, [session_id]).get(session_id, 0)


def pinned_upto_each(tx: Tx, session_ids: Sequence[str]) -> dict[str, int]:
    """As `pinned_upto`, of those of the sessions that are pinned."""
    if tx.points.pins is None:
        return {}
    keep(tx)
    rows = tx.each(tx.points.pins.upto, [{"sid": session_id} for session_id in session_ids])
    return {row[0]: row[1] for row in rows}


def read_pinned_upto(connection: Connection, points: StorePoints, session_id: str) -> int:
    """As `pinned_upto`, of what is committed."""
    row = None if points.pins is None else connection.execute(points.pins.upto.single, {"sid": session_id}).first()
    return 0 if row is None else row[1]


def is_pinned(points: StorePoints, heads: FromClause = sessions) -> ColumnElement[bool]:
    """Condition on heads: the session is pinned."""
    return false() if points.pins is None else points.pins.of_heads(heads)


def is_restoring(tx: Tx) -> bool:
    """Is the store being taken back to a checkpoint? The pins are kept: the answer holds until the transaction ends."""
    if tx.points.pins is None:
        return False
    keep(tx)
    return tx.one(tx.points.pins.restoring, {}) is not None
