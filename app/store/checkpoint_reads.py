"""What checkpoints have of sessions, for the page."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, select

from app.store import checkpoints as store
from app.store.checkpoints import Checkpoint
from app.store.schema import checkpoint_sessions, checkpoints, sessions


class InCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that has a session, as it was after event `seq`."""

    name: str
    created_at: float
    seq: int


class SessionThen(msgspec.Struct, frozen=True):
    """A session that a checkpoint has as it was after event `seq`; `version` and `status` are what it is now."""

    session_id: str
    seq: int
    version: int
    status: str
    group_id: str | None


def of_session(connection: Connection, session_id: str) -> list[InCheckpoint]:
    """The checkpoints that have the session, the oldest first."""
    query = (
        select(checkpoints.c.name, checkpoints.c.created_at, checkpoint_sessions.c.seq)
        .join_from(checkpoint_sessions, checkpoints, checkpoints.c.id == checkpoint_sessions.c.checkpoint_id)
        .where(checkpoint_sessions.c.session_id == session_id, checkpoints.c.name.is_not(None))
        .order_by(checkpoints.c.id)
    )
    return [InCheckpoint(*row) for row in connection.execute(query)]


def content(connection: Connection, name: str, after: str, limit: int) -> tuple[Checkpoint, list[SessionThen]] | None:
    """The checkpoint, and the next of its sessions by id after `after`; None if there is no such checkpoint.

    The rows are ordered by session, so a page reads those of the other checkpoints beside its own.
    """
    found = store.named(connection, name)
    if found is None:
        return None
    then = checkpoint_sessions.c
    query = (
        select(then.session_id, then.seq, sessions.c.version, sessions.c.status, sessions.c.group_id)
        .join_from(checkpoint_sessions, sessions, sessions.c.session_id == then.session_id)
        .where(then.checkpoint_id == found.id, then.session_id > after)
        .order_by(then.session_id)
        .limit(limit)
    )
    return found, [SessionThen(*row) for row in connection.execute(query)]
