"""The index of what has left for archives, and what the kernel asks of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Select,
    String,
    Table,
    Text,
    literal,
    select,
    text,
)

from app.domain.events import Event, TurnCommitted, TurnOpened
from app.store.dialect import Departed, ForEach, StorePoints, contains
from app.store.schema import NAMED, NAMING, SESSION_ID

metadata = MetaData(naming_convention=NAMING)

_IS_UNFINISHED = text("state IN ('writing', 'leaving', 'erasing')")

archived = Table(
    "archived",
    metadata,
    Column("session_id", SESSION_ID, nullable=False),
    Column("file", Text, nullable=False),
    Column("root_id", SESSION_ID, nullable=False),
    Column("state", String(16), nullable=False),
    Column("name", SESSION_ID),
    Column("generation", Integer),
    Column("frees_name", Boolean),
    Column("run", SESSION_ID, nullable=False),
    Column("marks", LargeBinary),
    PrimaryKeyConstraint("session_id", "file"),
    Index("ix_archived_name", "name", sqlite_where=NAMED, postgresql_where=NAMED),
    Index("ix_archived_root_id", "root_id"),
    Index("ix_archived_file", "file"),
    Index("ix_archived_state", "state", sqlite_where=_IS_UNFINISHED, postgresql_where=_IS_UNFINISHED),
)
"""Sessions in archives: `file` is the URL of a Parquet file that may hold the session, `root_id` its rollout's root,
also of the root itself. `features.archive.rows` has the states. `name`, `generation`, `frees_name` and `run` are the
session's: a run's name goes on behind generations that have left. `marks` tells retries of their turns (`marks_of`)."""

_STILL_HERE = ("writing", "copy")
"""States of a row whose session is in the database."""

_ids = ForEach(
    lambda given: select(archived.c.session_id).where(
        archived.c.session_id == given.sid, *(archived.c.state != state for state in _STILL_HERE)
    ),
    sid=Text,
)


def _generations(name: str) -> Select[Any]:
    left = select(archived.c.session_id, archived.c.generation, literal("archived", Text), archived.c.frees_name)
    return left.where(archived.c.name.is_not(None), archived.c.name == name, archived.c.state.not_in(_STILL_HERE))


def _attempted(name: str, mark: str, agent: str) -> Select[Any]:
    own = archived.alias()
    return (
        select(own.c.session_id, archived.c.generation)
        .join_from(archived, own, own.c.session_id == archived.c.session_id + agent)
        .where(
            archived.c.name.is_not(None),
            archived.c.name == name,
            own.c.state.not_in(_STILL_HERE),
            contains(own.c.marks, literal(_packed(mark), LargeBinary)),
        )
    )


DEPARTED = Departed(_ids, _generations, _attempted)


def marks_of(log: Iterable[Event]) -> bytes:
    """What `attempted` finds a session by that has left: its keys, and the bodies of its childless turns."""
    attempts = [event for event in log if isinstance(event, (TurnOpened, TurnCommitted))]
    committed = {event.turn: event for event in attempts if isinstance(event, TurnCommitted)}
    parents = {event.parent for event in committed.values()}
    marks = {event.retry_key for event in attempts if event.retry_key is not None}
    marks |= {event.body_hash for event in committed.values() if event.turn not in parents}
    return b"".join(map(_packed, sorted(marks)))


def _packed(mark: str) -> bytes:
    return hashlib.sha256(mark.encode()).digest()[:8]


def join(points: StorePoints) -> None:
    points.departed.append(DEPARTED)
