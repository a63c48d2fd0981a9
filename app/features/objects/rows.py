"""What the database says of objects, and the operations on it.

`dead_objects` is the queue of what may be deleted. A row with an `incarnation` is of what that process may still be
writing, and waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Integer,
    Text,
    and_,
    bindparam,
    delete,
    exists,
    insert,
    or_,
    select,
    update,
)

from app.features.objects import names
from app.features.objects.schema import OBJECTS, dead_objects, insert_dead_object, queue_freed
from app.store import feed
from app.store import statements as sql
from app.store.content import is_live
from app.store.dialect import ForEach, Tx, now
from app.store.incarnations import holds_lease
from app.store.log import BaseOperation
from app.store.schema import SESSION_ID, chunks, incarnations, open_turns, sessions, store_meta

LEASE = "objects"

OWNER = "objects_owner"
"""Key of `store_meta`: the random name of the store in object storage."""

_of_session = dead_objects.c.session_id == bindparam("sid", type_=SESSION_ID)
_is_written = dead_objects.c.incarnation.is_not(None)
_waits = exists().where(_of_session, _is_written)
_meta = store_meta.c.key == OBJECTS


class DeadObject(NamedTuple):
    """An object that may be deleted, or the beginning of the names of several (`names.is_prefix`)."""

    name: str
    session_id: str


def has_head(connection: Connection, session_id: str) -> bool:
    query = select(sessions.c.session_id).where(sessions.c.session_id == session_id)
    return connection.execute(query).first() is not None


def has_objects(connection: Connection) -> bool:
    """Does the store refer to any object, or wait for its deletion?"""
    queries = (select(chunks.c.number).where(is_live), select(dead_objects.c.name))
    return any(connection.execute(query.limit(1)).first() is not None for query in queries)


def url_of_objects(connection: Connection) -> str | None:
    """The URL below which the store's objects were when a server last started; None if there were none."""
    url: str | None = connection.execute(select(store_meta.c.value).where(_meta)).scalar()
    return url


def owner_name(connection: Connection) -> str:
    """What the store calls itself in object storage; another one after the restore of a backup."""
    return f"{connection.execute(_owner).scalar()}-{feed.log_epoch(connection)}"


def is_being_erased(connection: Connection, root_id: str) -> bool:
    """May there still be objects of this erased session, or of its rollout?"""
    query = (
        select(dead_objects.c.name)
        .join(sessions, sessions.c.session_id == dead_objects.c.session_id)
        .where(or_(sessions.c.session_id == root_id, sessions.c.root_id == root_id), sessions.c.status == "erased")
    )
    return connection.execute(query.limit(1)).first() is not None


def being_written(connection: Connection, session_id: str) -> bool:
    """May a process that lives still write an object of this session?"""
    return bool(connection.execute(select(_waits), {"sid": session_id}).scalar())


def written_by(connection: Connection, incarnation: int) -> list[DeadObject]:
    """What has been taken from this process, which may still be writing it."""
    query = select(dead_objects.c.name, dead_objects.c.session_id).where(dead_objects.c.incarnation == incarnation)
    return [DeadObject(*row) for row in connection.execute(query)]


_due = (
    select(dead_objects.c.name, dead_objects.c.session_id)
    .where(dead_objects.c.incarnation.is_(None), dead_objects.c.since <= now() - bindparam("keep_s"))
    .order_by(dead_objects.c.since)
    .limit(bindparam("most", type_=Integer))
)


def has_due(connection: Connection, keep_s: float, lease_s: float) -> bool:
    """May anything be deleted now, or once it is known that its writer is dead?"""
    if connection.execute(_due, {"keep_s": keep_s, "most": 1}).first() is not None:
        return True
    return connection.execute(_of_dead, {"lease_s": lease_s}).first() is not None


def note_objects(tx: Tx, url: str | None, owner: str) -> None:
    """Note that the store has objects below `url` (None: it has none), and give it the name `owner` in object storage,
    unless it has one."""
    tx.run(_forget_url, {})
    if url is not None:
        tx.insert(_insert_meta, [{"key": OBJECTS, "value": url}])
    if tx.one(_owner, {}) is None:
        tx.insert(_insert_meta, [{"key": OWNER, "value": owner}])


class TakeDue(BaseOperation, frozen=True):
    """What may be deleted now, the longest dead first. None of it with another fence than the lease's.

    Durable: a tombstone that a crash of PostgreSQL could undo must be on disk before its object goes.
    """

    fence: int
    keep_s: float
    limit: int

    def apply(self, tx: Tx) -> list[DeadObject]:
        if not holds_lease(tx, LEASE, self.fence):
            return []
        return [DeadObject(*row) for row in tx.all(_due, {"keep_s": self.keep_s, "most": self.limit})]


class ForgetDead(BaseOperation, frozen=True):
    """These objects are deleted."""

    durable: ClassVar[bool] = False
    dead: Sequence[DeadObject]

    def apply(self, tx: Tx) -> None:
        tx.each(_forget, [{"object": dead.name, "sid": dead.session_id} for dead in self.dead])


class BeginCopies(BaseOperation, frozen=True):
    """A process begins to write objects below `prefix`, for a session that is not there yet."""

    durable: ClassVar[bool] = False
    prefix: str
    of: str
    incarnation: int

    def apply(self, tx: Tx) -> None:
        tx.insert(insert_dead_object, [_row(self.prefix, self.of, self.incarnation)])


class EndWriting(BaseOperation, frozen=True):
    """A process has written, and does not write any more, what `abandon` took from it or what `BeginCopies` began."""

    durable: ClassVar[bool] = False
    written: Sequence[DeadObject]
    incarnation: int

    def apply(self, tx: Tx) -> None:
        rows = [{"object": dead.name, "sid": dead.session_id, "by": self.incarnation} for dead in self.written]
        tx.each(_end_writing, rows)


class EndWritingOfDead(BaseOperation, frozen=True):
    """Dead processes write no more: what they were writing may be deleted. A fork that one of them might still commit
    after it was paused is refused (`features.forks`)."""

    durable: ClassVar[bool] = False
    lease_s: float

    def apply(self, tx: Tx) -> None:
        tx.run(_end_writing_of_dead, {"lease_s": self.lease_s})


class QueueUnreferenced(BaseOperation, frozen=True):
    """Queue those of these objects that nothing refers to: no live chunk, no open turn that may yet commit, no line of
    the queue. Returns how many."""

    durable: ClassVar[bool] = False
    fence: int
    objects: Mapping[str, names.ParsedName]

    def apply(self, tx: Tx) -> int:
        if not holds_lease(tx, LEASE, self.fence):
            return 0
        unreferenced: list[tuple[str, str]] = []
        for session_id in sorted({parsed.session_id for parsed in self.objects.values()}):
            own = {"sid": session_id}
            # A commit takes the open turn, and a fork the line of its copies, and adds the chunks at once: looked at
            # last, these are not missed.
            opened = {row[0] for row in tx.all(_open_fences, own)}
            queued = tuple(row[0] for row in tx.all(_queued, own))
            used = {row[0] for row in tx.all(_locations, own)}
            unreferenced += [
                (name, session_id)
                for name, parsed in self.objects.items()
                if parsed.session_id == session_id
                and parsed.fence not in opened
                and name not in used
                and not name.startswith(queued)
            ]
        queue_freed(tx, unreferenced)
        for session_id in sorted({session_id for _, session_id in unreferenced}):
            head = tx.one(sql.head, {"sid": session_id})
            if head is not None and head[1] == "erased":  # a process that was paused has written it since
                tx.run(_hurry, {"sid": session_id})
        return len(unreferenced)


def _row(name: str, session_id: str, incarnation: int | None) -> dict[str, object]:
    return {"name": name, "session_id": session_id, "since": 0.0, "incarnation": incarnation}


_forget_url = delete(store_meta).where(_meta)
_owner = select(store_meta.c.value).where(store_meta.c.key == OWNER)
_insert_meta = insert(store_meta)


def _is_given(given: Any) -> ColumnElement[bool]:
    return and_(dead_objects.c.session_id == given.sid, dead_objects.c.name == given.object)


_forget = ForEach(
    lambda given: delete(dead_objects).where(_is_given(given)).returning(dead_objects.c.name), object=Text, sid=Text
)
_end_writing = ForEach(
    lambda given: (
        update(dead_objects)
        .where(_is_given(given), dead_objects.c.incarnation == given.by)
        .values(incarnation=None)
        .returning(dead_objects.c.name)
    ),
    object=Text,
    sid=Text,
    by=BigInteger,
)
_lives = exists().where(incarnations.c.id == dead_objects.c.incarnation, ~sql.holder_is_dead)
_of_dead = select(dead_objects.c.name).where(_is_written, ~_lives).limit(1)
_end_writing_of_dead = update(dead_objects).where(_is_written, ~_lives).values(incarnation=None)
_open_fences = select(open_turns.c.fence).where(open_turns.c.session_id == bindparam("sid", type_=SESSION_ID))
_locations = select(chunks.c.location).where(chunks.c.session_id == bindparam("sid", type_=SESSION_ID), is_live)
_queued = select(dead_objects.c.name).where(_of_session)
_hurry = update(dead_objects).where(_of_session).values(since=0.0)
