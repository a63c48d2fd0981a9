"""Checkpoints, what is in them, and what they pin: a session that is in one is neither freed nor erased, except by a
client."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Double,
    FromClause,
    Identity,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    bindparam,
    delete,
    exists,
    func,
    select,
)

from app.features.groups.schema import groups
from app.store.dialect import ForEach, Pins, StorePoints, Tx
from app.store.schema import NAMING, SESSION_ID

metadata = MetaData(naming_convention=NAMING)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), Identity(), primary_key=True),
    Column("name", String(128), unique=True),
    Column("state", String(16), nullable=False),
    Column("cut", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("sessions", Integer, nullable=False),
    Column("groups", Integer, nullable=False),
    Column("restores", String(128)),
)
"""Named cuts over the whole store; `created_at` is the database's clock.

`state`: `made`; `restoring` while the store is being taken back to the checkpoint `restores`, and this one keeps what
it was before; `deleting` while its rows are being deleted, without a name. `sessions` and `groups` count the
rows that it was made with.
"""

checkpoint_sessions = Table(
    "checkpoint_sessions",
    metadata,
    Column("session_id", SESSION_ID, nullable=False),
    Column("checkpoint_id", BigInteger, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("is_done", Boolean, nullable=False),
    PrimaryKeyConstraint("session_id", "checkpoint_id"),
    sqlite_with_rowid=False,
)
"""The last event of each session that is in a checkpoint. `is_done`: of a `restoring` one, the session has been taken
back. While a row is here, the session's content is neither freed nor erased, unless a client erases it."""

checkpoint_groups = Table(
    "checkpoint_groups",
    metadata,
    Column("checkpoint_id", BigInteger, nullable=False),
    *(Column(column.name, column.type, nullable=column.nullable) for column in groups.columns),
    PrimaryKeyConstraint("checkpoint_id", "run", "group_id"),
)
"""The rows of `groups` in a checkpoint: the training feed's leases and acknowledgements."""


_upto = ForEach(
    lambda given: (
        select(checkpoint_sessions.c.session_id, func.max(checkpoint_sessions.c.seq))
        .join_from(checkpoint_sessions, checkpoints, checkpoints.c.id == checkpoint_sessions.c.checkpoint_id)
        .where(checkpoint_sessions.c.session_id == given.sid, checkpoints.c.state != "deleting")
        .group_by(checkpoint_sessions.c.session_id)
    ),
    sid=Text,
)
_restoring = select(checkpoints.c.name).where(checkpoints.c.state == "restoring").limit(1)


def _is_pinned(heads: FromClause) -> ColumnElement[bool]:
    return exists().where(
        checkpoint_sessions.c.session_id == heads.c.session_id,
        checkpoints.c.id == checkpoint_sessions.c.checkpoint_id,
        checkpoints.c.state != "deleting",
    )


_forget_groups = delete(checkpoint_groups).where(checkpoint_groups.c.run == bindparam("of_run"))


def forget_groups(tx: Tx, run: str) -> None:
    """The run is erased: no restore gives its acknowledgements to another of its name."""
    tx.run(_forget_groups, {"of_run": run})


def join(points: StorePoints) -> None:
    points.run_erased.append(forget_groups)
    points.pins.append(Pins(_upto, _is_pinned, _restoring))
