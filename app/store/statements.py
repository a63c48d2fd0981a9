"""The Core statements for writes; the operations in `log*.py` use them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    Executable,
    Integer,
    Table,
    Text,
    and_,
    bindparam,
    case,
    delete,
    exists,
    insert,
    literal,
    or_,
    select,
    update,
)

from app.store.dialect import ForEach, now, tx_not_before, up_since
from app.store.schema import (
    SESSION_ID,
    annotation_columns,
    blobs,
    chunks,
    dead_objects,
    events,
    incarnations,
    open_turns,
    refused_replies,
    sessions,
    snapshots,
    store_meta,
    turns,
)
from app.store.schema import archived as archived_sessions

members = sessions.alias("members")
"""The sessions of a rollout, without its root."""


def of_session(table: Table) -> ColumnElement[bool]:
    """Condition on rows: of the session `sid`."""
    return table.c.session_id == bindparam("sid")


has_rows = or_(sessions.c.status == "open", sessions.c.status == "closed")
"""Condition on heads: neither erased nor undone."""


def _fenced(table: Table) -> ColumnElement[bool]:
    """Condition on rows: of the turn of the session `sid` that was opened under the fence `fenced`."""
    return of_session(table) & (table.c.fence == bindparam("fenced"))


_last = events.alias("last")
_tx_of_last = select(_last.c.tx).where(
    _last.c.session_id == bindparam("of_session"), _last.c.seq == bindparam("last_seq")
)
insert_event = insert(events).values(tx=tx_not_before(_tx_of_last.scalar_subquery()))
"""A transaction that began earlier, with other sessions, may write to a session later: its events stand behind those
that the session has all the same. None of them is passed by a reader, which stays below all that still run."""
insert_session = insert(sessions)
insert_open_turn = insert(open_turns)
insert_turn = insert(turns)
insert_blob = insert(blobs)
insert_chunk = insert(chunks)
insert_refused_reply = insert(refused_replies)

absorb_attempt = (
    update(turns)
    .where(
        turns.c.session_id == bindparam("sid"),
        turns.c.turn == bindparam("number"),
        turns.c.absorbed < bindparam("most"),
        turns.c.written_at > now() - bindparam("age_s", type_=Double),
    )
    .values(absorbed=turns.c.absorbed + 1)
    .returning(turns.c.turn)
)

head = select(
    sessions.c.version, sessions.c.status, sessions.c.open_turns, sessions.c.body_hash, sessions.c.turns
).where(of_session(sessions))
lock_head = select(sessions.c.version).where(of_session(sessions)).with_for_update()
"""Always lock the head before changing a session or its open turns; another order could deadlock."""
heads = ForEach(
    lambda given: select(sessions.c.session_id, sessions.c.status, sessions.c.body_hash).where(
        sessions.c.session_id == given.sid
    ),
    sid=Text,
)
archived = ForEach(
    lambda given: select(archived_sessions.c.session_id).where(
        archived_sessions.c.session_id == given.sid,
        archived_sessions.c.state != "writing",
        archived_sessions.c.state != "copy",
    ),
    sid=Text,
)
"""Sessions that are in an archive and not here, or were erased there."""
generations_from = select(sessions.c.status, sessions.c.body_hash).where(
    sessions.c.name.is_not(None), sessions.c.name == bindparam("called"), sessions.c.generation >= bindparam("number")
)
"""The sessions of a name from a generation on: of two processes that begin one, the second finds the first's."""


def _has_event(given: Any) -> ColumnElement[bool]:
    """Does the log of `sid` have event `known`, written at `known_at`?"""
    return exists().where(events.c.session_id == given.sid, events.c.seq == given.known, events.c.at == given.known_at)


def _claim_heads(given: Any) -> Executable:
    """Count a turn as open: in an open session whose log goes on from what the caller knows, where no turn has been
    committed or undone since, and fewer than `most` are open."""
    restored = exists().where(
        events.c.session_id == given.sid, events.c.seq > given.known, events.c.type == "SessionRestored"
    )
    return (
        update(sessions)
        .where(
            sessions.c.session_id == given.sid,
            sessions.c.status == "open",
            sessions.c.turns == given.known_turns,
            sessions.c.open_turns < given.most,
            _has_event(given),
            ~restored,
        )
        .values(
            version=sessions.c.version + 1,
            open_turns=sessions.c.open_turns + 1,
            last_turn=sessions.c.last_turn + 1,
        )
        .returning(sessions.c.session_id, sessions.c.version, sessions.c.last_turn)
    )


claim_heads = ForEach(_claim_heads, sid=Text, known=BigInteger, known_at=Double, known_turns=Integer, most=Integer)


def _is_held(given: Any) -> list[ColumnElement[bool]]:
    """Conditions on open turns: process `holder` claimed this one at `claimed_at` under the fence `fenced`."""
    return [
        open_turns.c.session_id == given.sid,
        open_turns.c.fence == given.fenced,
        open_turns.c.incarnation == given.holder,
        open_turns.c.opened_at == given.claimed_at,
    ]


def _free_open_turns(given: Any) -> Executable:
    """End held turns whose commits were decided for all turns that are committed; with `known`, for the whole log."""
    is_last = exists().where(sessions.c.session_id == given.sid, sessions.c.version == given.known)
    is_current = exists().where(sessions.c.session_id == given.sid, sessions.c.turns == given.known_turns)
    is_whole = or_(given.known.is_(None), and_(is_last, _has_event(given)))
    return delete(open_turns).where(*_is_held(given), is_current, is_whole).returning(open_turns.c.session_id)


_HELD: dict[str, Any] = {"sid": Text, "fenced": BigInteger, "holder": BigInteger, "claimed_at": Double}
free_open_turns = ForEach(_free_open_turns, **_HELD, known=BigInteger, known_at=Double, known_turns=Integer)


def _commit_heads(given: Any) -> Executable:
    """Advance heads by `count` events, of which one commits a turn. `weight` is its largest numeric version, or None;
    `by` its engine."""
    is_newer = or_(sessions.c.weight_version.is_(None), sessions.c.weight_version < given.weight)
    return (
        update(sessions)
        .where(sessions.c.session_id == given.sid)
        .values(
            version=sessions.c.version + given.count,
            open_turns=sessions.c.open_turns - 1,
            turns=sessions.c.turns + 1,
            updated_at=given.moved_at,
            weight_version=case((is_newer, given.weight), else_=sessions.c.weight_version),
            engine=given.by,
        )
        .returning(sessions.c.session_id, sessions.c.version)
    )


commit_heads = ForEach(_commit_heads, sid=Text, count=BigInteger, moved_at=Double, weight=BigInteger, by=Text)
_held_given = SimpleNamespace(**{name: bindparam(name, type_=kind()) for name, kind in _HELD.items()})
free_open_turn = delete(open_turns).where(*_is_held(_held_given)).returning(open_turns.c.fence)
holds_open_turn = select(open_turns.c.fence).where(*_is_held(_held_given))
advance_head = (
    update(sessions)
    .where(of_session(sessions))
    .values(
        version=sessions.c.version + bindparam("count"),
        open_turns=sessions.c.open_turns - bindparam("freed"),
        updated_at=bindparam("at"),
    )
    .returning(sessions.c.version)
)
touch = (
    update(sessions)
    .where(of_session(sessions), has_rows)
    .values(version=sessions.c.version + 1, updated_at=bindparam("at"))
    .returning(sessions.c.version, sessions.c.group_id, sessions.c.root_id)
)
set_reward = update(sessions).where(of_session(sessions)).values(reward=bindparam("value"))
close_head = (
    update(sessions)
    .where(of_session(sessions), sessions.c.status == "open")
    .values(status="closed", closed_at=bindparam("at"))
    .returning(sessions.c.group_id, sessions.c.root_id)
)


def is_idle(since: ColumnElement[float]) -> ColumnElement[bool]:
    """Condition on heads: it and its rollout's open sessions have no turn in flight and are unchanged since then."""
    of_root = (members.c.root_id == sessions.c.session_id) & (members.c.status == "open")
    busy = or_(members.c.open_turns > 0, members.c.updated_at > since)
    return (sessions.c.open_turns == 0) & (sessions.c.updated_at <= since) & ~exists().where(of_root, busy)


close_idle_head = close_head.where(is_idle(bindparam("idle_since", type_=Double)))
ENDED = ("closed", "undone")
"""What a session may be whose content is freed or erased."""
erase_head = (
    update(sessions)
    .where(of_session(sessions), or_(*(sessions.c.status == status for status in ENDED)))
    .values(status="erased", note=None, tags=None)
    .returning(sessions.c.group_id, sessions.c.root_id)
)
# No process could send heartbeats while the database was down: after its restart all are believed alive for one lease.
holder_is_dead = or_(
    incarnations.c.ended_at.is_not(None),
    (incarnations.c.heartbeat_at < now() - bindparam("lease_s")) & (up_since() < now() - bindparam("lease_s")),
    incarnations.c.id.is_(None),
)
holders = open_turns.outerjoin(incarnations, incarnations.c.id == open_turns.c.incarnation)
open_turns_of = (
    select(
        open_turns.c.turn,
        open_turns.c.fence,
        open_turns.c.incarnation,
        open_turns.c.body_hash,
        open_turns.c.retry_key,
        open_turns.c.opened_at,
        holder_is_dead.label("dead"),
    )
    .select_from(holders)
    .where(of_session(open_turns))
)
open_turns_by = select(open_turns.c.turn, open_turns.c.fence, open_turns.c.session_id, open_turns.c.opened_at).where(
    open_turns.c.incarnation == bindparam("incarnation")
)
dead_open_turns = (
    select(open_turns.c.session_id)
    .select_from(holders)
    .where(holder_is_dead, open_turns.c.session_id > bindparam("after"))
    .order_by(open_turns.c.session_id)
    .limit(bindparam("most"))
)
drop_open_turn = delete(open_turns).where(_fenced(open_turns))
drop_staged = delete(chunks).where(_fenced(chunks))


def _tombstone_chunks(given: Any) -> Executable:
    """Returns the objects that nothing refers to any more."""
    is_live = chunks.c.tombstoned_by.is_(None)
    return (
        update(chunks)
        .where(
            chunks.c.session_id == given.sid, chunks.c.fence == given.fenced, chunks.c.number == given.place, is_live
        )
        .values(data=None, tombstoned_by=given.by)
        .returning(chunks.c.location, chunks.c.session_id)
    )


tombstone_chunks = ForEach(_tombstone_chunks, sid=Text, fenced=BigInteger, place=Integer, by=BigInteger)
_dead = ["name", "session_id", "since"]
queue_dead = ForEach(
    lambda given: insert(dead_objects).from_select(_dead, select(given.object, given.sid, now())), object=Text, sid=Text
)
queue_objects = insert(dead_objects).from_select(
    _dead,
    select(chunks.c.location, chunks.c.session_id, now()).where(
        of_session(chunks), chunks.c.tombstoned_by.is_(None), chunks.c.location.is_not(None)
    ),
)
"""All objects of a session that is about to lose its chunks."""

OBJECTS = "objects"
"""Key of `store_meta`: the URL of the object storage, if the store has any."""

_has_objects = exists().where(store_meta.c.key == OBJECTS)
insert_dead_object = insert(dead_objects)
unqueue_objects = delete(dead_objects).where(of_session(dead_objects), dead_objects.c.incarnation.is_(None))
queue_prefix = insert(dead_objects).from_select(
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
    of_session(dead_objects),
    dead_objects.c.name == bindparam("object", type_=dead_objects.c.name.type),
    dead_objects.c.incarnation.is_not(None),
)
chunk_numbers = select(chunks.c.number).where(_fenced(chunks))
tombstone_event = select(events.c.seq).where(
    of_session(events),
    events.c.seq == bindparam("place", type_=BigInteger),
    events.c.type == "BlobsTombstoned",
)
live_chunks = (
    select(chunks.c.fence, chunks.c.number)
    .where(of_session(chunks), chunks.c.tombstoned_by.is_(None))
    .limit(bindparam("most"))
)
oldest_refused = (
    select(refused_replies.c.fence)
    .where(of_session(refused_replies))
    .order_by(refused_replies.c.fence.desc())
    .offset(bindparam("kept"))
    .limit(1)
)
drop_refused = delete(refused_replies).where(of_session(refused_replies), refused_replies.c.fence <= bindparam("upto"))
drop_all_refused = delete(refused_replies).where(of_session(refused_replies))
drop_content = tuple(
    delete(table).where(of_session(table))
    for table in (turns, annotation_columns, blobs, chunks, refused_replies, snapshots)
)
drop_snapshot = delete(snapshots).where(of_session(snapshots))
insert_snapshot = insert(snapshots)
