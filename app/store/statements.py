"""The Core statements for writes; the operations in `log*.py` use them."""

from __future__ import annotations

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
    delete,
    exists,
    insert,
    or_,
    select,
    update,
)

from app.store.dialect import ForEach, now, tx_not_before, up_since
from app.store.schema import (
    annotation_columns,
    blobs,
    chunks,
    events,
    incarnations,
    open_turns,
    refused_replies,
    sessions,
    snapshots,
    turns,
)

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
    sessions.c.version, sessions.c.status, sessions.c.open_turns, sessions.c.body_hash, sessions.c.turns, sessions.c.run
).where(of_session(sessions))
lock_head = select(sessions.c.version).where(of_session(sessions)).with_for_update()
"""Always lock the head before changing a session or its open turns; another order could deadlock."""
heads = ForEach(
    lambda given: select(sessions.c.session_id, sessions.c.status, sessions.c.body_hash).where(
        sessions.c.session_id == given.sid
    ),
    sid=Text,
)
generations_from = ForEach(
    lambda given: (
        select(sessions.c.run, sessions.c.name, sessions.c.session_id, sessions.c.status, sessions.c.body_hash)
        .where(
            sessions.c.name.is_not(None),
            sessions.c.name == given.called,
            sessions.c.run == given.of_run,
            sessions.c.generation >= given.number,
        )
        .order_by(sessions.c.status != "open", sessions.c.status == "undone", sessions.c.generation.desc())
    ),
    of_run=Text,
    called=Text,
    number=Integer,
)
"""The sessions of a run's name from a generation on, in `names._newest`'s order: of two processes that begin one, the
second finds the first's."""


def _written_at(seq: ColumnElement[int]) -> ColumnElement[float]:
    """When the event `seq` of a head's log was written."""
    query = select(events.c.at).where(events.c.session_id == sessions.c.session_id, events.c.seq == seq)
    return query.scalar_subquery()


def _heads_since(given: Any) -> Executable:
    """A head with the time of its last event, and what has come since event `known`: when that was written, and whether
    turns have been undone or given back, or have been ended, or count against other limits, since."""
    overtaken = exists().where(
        events.c.session_id == sessions.c.session_id,
        events.c.seq > given.known,
        or_(
            events.c.type == "SessionRestored",
            events.c.type == "SessionFinished",
            events.c.type == "RolloutJoined",
        ),
    )
    return select(
        sessions.c.session_id,
        sessions.c.status,
        sessions.c.version,
        _written_at(sessions.c.version),
        sessions.c.turns,
        sessions.c.open_turns,
        sessions.c.last_turn,
        _written_at(given.known),
        overtaken,
    ).where(sessions.c.session_id == given.sid)


heads_since = ForEach(_heads_since, sid=Text, known=BigInteger)
_is_held = and_(
    of_session(open_turns),
    open_turns.c.fence == bindparam("fenced"),
    open_turns.c.incarnation == bindparam("holder"),
    open_turns.c.opened_at == bindparam("claimed_at"),
)
"""Condition on open turns: process `holder` claimed this one at `claimed_at` under the fence `fenced`. The time tells
it from one that a crash of PostgreSQL has undone, whose fence is given again."""

free_open_turn = delete(open_turns).where(_is_held).returning(open_turns.c.fence)
holds_open_turn = select(open_turns.c.fence).where(_is_held)
advance_head = (
    update(sessions)
    .where(of_session(sessions))
    .values(
        version=sessions.c.version + bindparam("count"),
        open_turns=sessions.c.open_turns - bindparam("freed"),
        updated_at=bindparam("at"),
        engine_errors=sessions.c.engine_errors + bindparam("wrong"),
    )
    .returning(sessions.c.version)
)
touch = (
    update(sessions)
    .where(of_session(sessions), has_rows)
    .values(version=sessions.c.version + 1, updated_at=bindparam("at"))
    .returning(sessions.c.version, sessions.c.run, sessions.c.group_id, sessions.c.root_id)
)
set_reward = update(sessions).where(of_session(sessions)).values(reward=bindparam("value"), failed=None)
is_failed = select(sessions.c.failed).where(of_session(sessions), sessions.c.failed.is_not(None))
set_failed = update(sessions).where(of_session(sessions)).values(failed=bindparam("kind"))
set_evaluation = update(sessions).where(of_session(sessions)).values(evaluation=True)
close_head = (
    update(sessions)
    .where(of_session(sessions), sessions.c.status == "open")
    .values(status="closed", closed_at=bindparam("at"))
    .returning(sessions.c.run, sessions.c.group_id, sessions.c.root_id)
)
close_known_head = close_head.where(sessions.c.version == bindparam("known"))


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
    .values(status="erased", note=None, tags=None, annotated=None)
    .returning(sessions.c.run, sessions.c.group_id, sessions.c.root_id)
)


def _holder_is_dead(lease_s: ColumnElement[float]) -> ColumnElement[bool]:
    # No process could send heartbeats while the database was down: after its restart all are believed alive for one
    # lease.
    return or_(
        incarnations.c.ended_at.is_not(None),
        (incarnations.c.heartbeat_at < now() - lease_s) & (up_since() < now() - lease_s),
        incarnations.c.id.is_(None),
    )


holder_is_dead = _holder_is_dead(bindparam("lease_s"))
holders = open_turns.outerjoin(incarnations, incarnations.c.id == open_turns.c.incarnation)
open_turns_of = ForEach(
    lambda given: (
        select(
            open_turns.c.session_id,
            open_turns.c.turn,
            open_turns.c.fence,
            open_turns.c.incarnation,
            open_turns.c.body_hash,
            open_turns.c.retry_key,
            open_turns.c.opened_at,
            _holder_is_dead(given.lease),
        )
        .select_from(holders)
        .where(open_turns.c.session_id == given.sid)
    ),
    sid=Text,
    lease=Double,
)
open_turns_by = select(open_turns.c.session_id, open_turns.c.opened_at).where(
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
drop_staged_chunks = delete(chunks).where(_fenced(chunks))


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
chunk_numbers = ForEach(
    lambda given: select(chunks.c.session_id, chunks.c.number).where(
        chunks.c.session_id == given.sid, chunks.c.fence == given.fenced
    ),
    sid=Text,
    fenced=BigInteger,
)
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
