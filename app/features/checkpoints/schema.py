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
    UniqueConstraint,
    bindparam,
    delete,
    exists,
    func,
    or_,
    select,
    update,
)

from app.domain.patterns import ALL_RUNS
from app.features.groups.schema import groups
from app.store import pins
from app.store.damage import Content
from app.store.dialect import ForEach, Pins, StorePoints, Tx
from app.store.schema import NAMING, SESSION_ID

metadata = MetaData(naming_convention=NAMING)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), Identity(), primary_key=True),
    Column("run", SESSION_ID, nullable=False),
    Column("name", String(128)),
    Column("state", String(16), nullable=False),
    Column("cut", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("sessions", Integer, nullable=False),
    Column("groups", Integer, nullable=False),
    Column("restores", String(128)),
    Column("metadata", Content),
    UniqueConstraint("run", "name"),
)
"""Named cuts over a run, or over the whole store (`run` is ALL_RUNS); `created_at` is the database's clock.

`state`: `made`; `restoring` while the run is being taken back to its checkpoint `restores`, and this one keeps what it
was before; `deleting` while its rows are being deleted, without a name. `sessions` and `groups` count its rows.
`metadata` is JSON.
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
_named = bindparam("named", type_=String)
_overlaps = or_(_named == ALL_RUNS, checkpoints.c.run == _named, checkpoints.c.run == ALL_RUNS)
_restoring = select(checkpoints.c.name).where(checkpoints.c.state == "restoring", _overlaps).limit(1)
_forget_groups = delete(checkpoint_groups).where(checkpoint_groups.c.run == _named)
_forget = (
    update(checkpoints)
    .where(checkpoints.c.run == _named)
    .values(name=None, restores=None, metadata=None, state="deleting")
)


def forget(tx: Tx, run: str) -> None:
    """The run was erased: its checkpoints are gone, and its groups are taken out of those of all runs."""
    pins.change(tx)
    tx.run(_forget_groups, {"named": run})
    tx.run(_forget, {"named": run})


def _is_pinned(heads: FromClause) -> ColumnElement[bool]:
    return exists().where(
        checkpoint_sessions.c.session_id == heads.c.session_id,
        checkpoints.c.id == checkpoint_sessions.c.checkpoint_id,
        checkpoints.c.state != "deleting",
    )


def join(points: StorePoints) -> None:
    points.pins.append(Pins(_upto, _is_pinned, _restoring))
    points.run_erased.append(forget)
