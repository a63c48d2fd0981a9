"""The queue of objects that may be deleted, and what the kernel's transactions put into it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    bindparam,
    delete,
    exists,
    insert,
    literal,
    select,
    text,
)

from app.features.objects import names
from app.store import statements as sql
from app.store.dialect import ForEach, StorePoints, Tx, now
from app.store.schema import NAMING, SESSION_ID, SHORT_LIVED, chunks, store_meta

metadata = MetaData(naming_convention=NAMING)

_IS_WRITTEN = text("incarnation IS NOT NULL")

dead_objects = Table(
    "dead_objects",
    metadata,
    Column("session_id", SESSION_ID, nullable=False),
    Column("name", Text, nullable=False),
    Column("since", Double, nullable=False),
    Column("incarnation", BigInteger),
    PrimaryKeyConstraint("session_id", "name"),
    Index("ix_dead_objects_since", "since"),
    Index("ix_dead_objects_incarnation", "incarnation", sqlite_where=_IS_WRITTEN, postgresql_where=_IS_WRITTEN),
    postgresql_with=SHORT_LIVED,
)
"""Objects to be deleted, which no live chunk refers to; `since` is the database's clock, 0 for at once.

A `name` that ends with `/`, `.` or `-` stands for all that begin with it: those of an erased session, of a turn that
lost its claim, of a fork. While `incarnation` is set, that process may still be writing them.
"""

_dead = ["name", "session_id", "since"]

_queue_dead = ForEach(
    lambda given: insert(dead_objects).from_select(_dead, select(given.object, given.sid, now())), object=Text, sid=Text
)

queue_objects = insert(dead_objects).from_select(
    _dead,
    select(chunks.c.location, chunks.c.session_id, now()).where(
        sql.of_session(chunks), chunks.c.tombstoned_by.is_(None), chunks.c.location.is_not(None)
    ),
)
"""All objects of a session that is about to lose its chunks."""

OBJECTS = "objects"
"""Key of `store_meta`: the URL of the object storage, if the store has any."""

_has_objects = exists().where(store_meta.c.key == OBJECTS)

insert_dead_object = insert(dead_objects)

_unqueue = delete(dead_objects).where(sql.of_session(dead_objects), dead_objects.c.incarnation.is_(None))
"""But for what a process may still be writing: an object that comes after the deletion would never be found again."""

_queue_prefix = insert(dead_objects).from_select(
    [*_dead, "incarnation"],
    select(
        bindparam("object", type_=dead_objects.c.name.type),
        bindparam("sid", type_=SESSION_ID),
        literal(0.0),
        bindparam("incarnation", type_=BigInteger),
    ).where(_has_objects),
)
"""`incarnation` may still be writing objects of these names; null for nobody."""

take_copies = delete(dead_objects).where(
    sql.of_session(dead_objects),
    dead_objects.c.name == bindparam("object", type_=dead_objects.c.name.type),
    # Once the writer counts as dead the line has no incarnation, and the copies may be deleted: a fork that a paused
    # process commits after that must find nothing here.
    dead_objects.c.incarnation.is_not(None),
)


def queue_voided(tx: Tx, session_id: str, claims: Sequence[tuple[int, int]]) -> None:
    """Turns were taken from these processes, which may still be writing objects of them; a claim is its fence and its
    process."""
    for fence, incarnation in claims:
        prefix = names.of_turn(session_id, incarnation, fence)
        tx.run(_queue_prefix, {"object": prefix, "sid": session_id, "incarnation": incarnation})


def queue_freed(tx: Tx, objects: Sequence[tuple[str, str]]) -> None:
    """No chunk refers to these objects any more; each is told by its name and its session."""
    tx.each(_queue_dead, [{"object": name, "sid": session_id} for name, session_id in objects])


def queue_erased(tx: Tx, session_id: str) -> None:
    """All objects of the session go at once."""
    tx.run(_unqueue, {"sid": session_id})
    tx.run(_queue_prefix, {"object": names.folder_of(session_id), "sid": session_id})


def join(points: StorePoints) -> None:
    points.voided.append(queue_voided)
    points.freed.append(queue_freed)
    points.erased.append(queue_erased)
