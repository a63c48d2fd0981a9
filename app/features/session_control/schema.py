"""The table of what clients bound by `nvext.session_control`, and what a close writes into it."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    MetaData,
    String,
    Table,
    Text,
    bindparam,
    insert,
    literal,
    select,
    true,
    update,
)

from app.store.dialect import StorePoints, Tx, now
from app.store.schema import NAMING, SESSION_ID, sessions

metadata = MetaData(naming_convention=NAMING)

affinities = Table(
    "affinities",
    metadata,
    Column("control_id", SESSION_ID, primary_key=True),
    Column("engine", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("worker_session", Boolean, nullable=False),
    Column("timeout_s", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("session_id", SESSION_ID, nullable=False),
    Index("ix_affinities_expires_at", "expires_at"),
)
"""What clients asked for by `nvext.session_control`: a truth of its own, that of no log.

`state`: `opening` (the engine is being asked), `bound`, `closing` (its last turn is running), `ending` (the engine is
being told), by process `incarnation`. `worker_session`: the engine was asked to open a session, and must be told of its
end. Times are the database's clock. `session_id` is the session whose turn asked for it last.
"""

_last_engine = select(sessions.c.engine).where(
    sessions.c.session_id == bindparam("sid", type_=String()), sessions.c.engine.is_not(None)
)
_end_of_session = insert(affinities).from_select(
    [*(column.name for column in affinities.columns)],
    _last_engine.with_only_columns(
        bindparam("name", type_=String()),
        sessions.c.engine,
        literal("ending"),
        true(),
        literal(0.0),
        now(),
        literal(0),
        sessions.c.session_id,
    ),
)
"""`incarnation` 0 is no process's, so the first one that looks tells the engine."""

_end_again = (
    update(affinities)
    .where(affinities.c.control_id == bindparam("name", type_=String()), _last_engine.exists())
    .values(engine=_last_engine.scalar_subquery(), incarnation=0)
)
"""The session was closed before, and a restore opened it again, while the engine has not answered yet."""


def end_at_engine(tx: Tx, session_id: str, name: str | None) -> None:
    """A session has been closed: have some process tell its last engine, if it had a turn, that the session `name` has
    ended. None: the engine holds none for it."""
    if name is None:
        return
    values = {"sid": session_id, "name": name}
    if not tx.run(_end_again, values):
        tx.run(_end_of_session, values)


def join(points: StorePoints) -> None:
    points.closed.append(end_at_engine)
