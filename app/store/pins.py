"""What is kept of sessions (`StorePoints.pins`): it is neither freed nor erased, except by a client.

A transaction that drops content keeps the pins until it ends, and looks at them after that. Pins are made only between
such transactions. So one that is made later finds the content gone, and one that was made before is seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, FromClause, false, or_, select

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
    if not tx.points.pins:
        return {}
    keep(tx)
    rows = [{"sid": session_id} for session_id in session_ids]
    pinned = sorted((row[0], row[1]) for kept in tx.points.pins for row in tx.each(kept.upto, rows))
    return dict(pinned)  # the last of a session counts


def read_pinned_upto(connection: Connection, points: StorePoints, session_id: str) -> int:
    """As `pinned_upto`, of what is committed."""
    rows = [connection.execute(kept.upto.single, {"sid": session_id}).first() for kept in points.pins]
    return max((row[1] for row in rows if row is not None), default=0)


def is_pinned(points: StorePoints, heads: FromClause = sessions) -> ColumnElement[bool]:
    """Condition on heads: the session is pinned."""
    return or_(false(), *(kept.of_heads(heads) for kept in points.pins))


def is_restoring(tx: Tx, run: str) -> bool:
    """Is the run, or the whole store, being taken back to a checkpoint? ALL_RUNS: is any run?

    The pins are kept: the answer holds until the transaction ends.
    """
    if not tx.points.pins:
        return False
    keep(tx)
    return any(tx.one(kept.restoring, {"named": run}) is not None for kept in tx.points.pins)
