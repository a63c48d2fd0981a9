"""The statements that write, in Core; `log.py` says when each runs."""

from __future__ import annotations

from sqlalchemy import bindparam, delete, insert, or_, select, update

from app.store.dialect import now
from app.store.schema import blobs, events, incarnations, open_turns, sessions, snapshots, turns

insert_event = insert(events)
insert_session = insert(sessions)
insert_open_turn = insert(open_turns)
insert_turn = insert(turns)
insert_blob = insert(blobs)

head = select(sessions.c.version, sessions.c.status, sessions.c.open_turns, sessions.c.body_hash).where(
    sessions.c.session_id == bindparam("sid")
)
lock_head = select(sessions.c.version).where(sessions.c.session_id == bindparam("sid")).with_for_update()
"""Whoever changes a session and its open turns locks the head first; two who differ would wait for each other."""

claim_head = (
    update(sessions)
    .where(
        sessions.c.session_id == bindparam("sid"),
        sessions.c.version == bindparam("expected"),
        sessions.c.open_turns == 0,
        sessions.c.status == "open",
    )
    .values(version=sessions.c.version + 1, open_turns=1)
)
free_open_turn = (
    delete(open_turns)
    .where(
        open_turns.c.session_id == bindparam("sid"),
        open_turns.c.fence == bindparam("fenced"),
        open_turns.c.incarnation == bindparam("holder"),
    )
    .returning(open_turns.c.fence)
)
advance_head = (
    update(sessions)
    .where(sessions.c.session_id == bindparam("sid"))
    .values(
        version=sessions.c.version + bindparam("count"),
        open_turns=sessions.c.open_turns - bindparam("freed"),
        turns=sessions.c.turns + bindparam("committed"),
        updated_at=bindparam("at"),
    )
    .returning(sessions.c.version)
)
touch = (
    update(sessions)
    .where(sessions.c.session_id == bindparam("sid"), sessions.c.status != "erased")
    .values(version=sessions.c.version + 1, updated_at=bindparam("at"))
    .returning(sessions.c.version)
)
set_reward = update(sessions).where(sessions.c.session_id == bindparam("sid")).values(reward=bindparam("value"))
set_status = (
    update(sessions)
    .where(sessions.c.session_id == bindparam("sid"), sessions.c.status == bindparam("was"))
    .values(status=bindparam("state"))
)
holder_is_dead = or_(
    incarnations.c.ended_at.is_not(None),
    incarnations.c.heartbeat_at < now() - bindparam("lease_s"),
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
        holder_is_dead.label("dead"),
    )
    .select_from(holders)
    .where(open_turns.c.session_id == bindparam("sid"))
)
dead_open_turns = (
    select(open_turns.c.session_id)
    .select_from(holders)
    .where(holder_is_dead, open_turns.c.session_id > bindparam("after"))
    .order_by(open_turns.c.session_id)
    .limit(bindparam("most"))
)
drop_open_turn = delete(open_turns).where(
    open_turns.c.session_id == bindparam("sid"), open_turns.c.fence == bindparam("fenced")
)
drop_content = tuple(delete(table).where(table.c.session_id == bindparam("sid")) for table in (turns, blobs, snapshots))
drop_snapshot = delete(snapshots).where(snapshots.c.session_id == bindparam("sid"))
insert_snapshot = insert(snapshots)
