"""The Core statements for writes; the operations in `log*.py` use them."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    String,
    Table,
    Text,
    bindparam,
    case,
    delete,
    exists,
    insert,
    or_,
    select,
    update,
)

from app.store.dialect import now, tx_not_before, up_since
from app.store.schema import archived as archived_table
from app.store.schema import (
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
"""Condition on heads: neither erased nor set aside."""


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

head = select(
    sessions.c.version, sessions.c.status, sessions.c.open_turns, sessions.c.body_hash, sessions.c.turns
).where(of_session(sessions))
lock_head = select(sessions.c.version).where(of_session(sessions)).with_for_update()
"""Always lock the head before changing a session or its open turns; another order could deadlock."""
archived = select(archived_table.c.session_id).where(
    or_(
        archived_table.c.session_id == bindparam("sid"),
        archived_table.c.session_id == bindparam("parent", type_=String),
    ),
    archived_table.c.state != "writing",
    archived_table.c.state != "copy",
)
"""Is the session `sid`, or `parent`, in an archive and not here, or was it erased there?"""


def _is_open_after(expected: ColumnElement[int], last_event_at: ColumnElement[float]) -> list[ColumnElement[bool]]:
    """Conditions on a head: open, and its log has event `expected`, written at `last_event_at`."""
    known = exists().where(
        events.c.session_id == sessions.c.session_id, events.c.seq == expected, events.c.at == last_event_at
    )
    return [sessions.c.status == "open", known]


def claimable(expected: ColumnElement[int], last_event_at: ColumnElement[float]) -> list[ColumnElement[bool]]:
    """Conditions on a linear session's head: open, without an open turn, and its last event is number `expected`,
    written at `last_event_at`."""
    alone = [sessions.c.version == expected, sessions.c.open_turns == 0]
    return [*alone, *_is_open_after(expected, last_event_at)]


_EXPECTED = bindparam("expected", type_=BigInteger), bindparam("last_event_at", type_=Double)
opened_values = {
    "version": sessions.c.version + 1,
    "open_turns": sessions.c.open_turns + 1,
    "last_turn": 1 + case((sessions.c.last_turn < sessions.c.turns, sessions.c.turns), else_=sessions.c.last_turn),
}
"""A process of a release before 0009 does not count `last_turn`, but leaves no gaps."""
claim_head = update(sessions).where(of_session(sessions), *claimable(*_EXPECTED)).values(opened_values)
_restored_since = exists().where(
    events.c.session_id == sessions.c.session_id, events.c.seq > _EXPECTED[0], events.c.type == "SessionRestored"
)
claim_tree_head = (
    update(sessions)
    .where(
        of_session(sessions),
        *_is_open_after(*_EXPECTED),
        ~_restored_since,
        sessions.c.turns == bindparam("known_turns"),
        sessions.c.open_turns < bindparam("max_open"),
    )
    .values(opened_values)
    .returning(sessions.c.version, sessions.c.last_turn)
)
"""As `claim_head` for a tree: other turns may be open, but none has been committed that the caller does not know, and
none that it knows has been set aside."""
free_open_turn = (
    delete(open_turns)
    .where(
        _fenced(open_turns),
        open_turns.c.incarnation == bindparam("incarnation"),
    )
    .returning(open_turns.c.fence)
)
free_opened_turn = free_open_turn.where(open_turns.c.opened_at == bindparam("opened_at"))
advance_head = (
    update(sessions)
    .where(of_session(sessions))
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
    .where(of_session(sessions), has_rows)
    .values(version=sessions.c.version + 1, updated_at=bindparam("at"))
    .returning(sessions.c.version)
)
_given = {name: bindparam(f"new_{name}", type_=Text) for name in ("note", "tags")}
set_note = update(sessions).where(of_session(sessions)).values(note=_given["note"])
set_tags = update(sessions).where(of_session(sessions)).values(tags=_given["tags"])
set_reward = update(sessions).where(of_session(sessions)).values(reward=bindparam("value"))
close_head = (
    update(sessions)
    .where(of_session(sessions), sessions.c.status == "open")
    .values(status="closed", closed_at=bindparam("at"))
)


def is_idle(since: ColumnElement[float]) -> ColumnElement[bool]:
    """Condition on heads: it and its rollout's open sessions have no turn in flight and are unchanged since then."""
    of_root = (members.c.root_id == sessions.c.session_id) & (members.c.status == "open")
    busy = or_(members.c.open_turns > 0, members.c.updated_at > since)
    return (sessions.c.open_turns == 0) & (sessions.c.updated_at <= since) & ~exists().where(of_root, busy)


close_idle_head = close_head.where(is_idle(bindparam("idle_since", type_=Double)))
ENDED = ("closed", "set_aside")
"""What a session may be whose content is freed or erased."""
erase_head = (
    update(sessions)
    .where(of_session(sessions), or_(*(sessions.c.status == status for status in ENDED)))
    .values(status="erased", note=None, tags=None)
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
holds_open_turn = select(open_turns.c.fence).where(
    _fenced(open_turns),
    open_turns.c.incarnation == bindparam("incarnation"),
)
holds_opened_turn = holds_open_turn.where(open_turns.c.opened_at == bindparam("opened_at"))
drop_staged = delete(chunks).where(_fenced(chunks))
tombstone_chunk = (
    update(chunks)
    .where(
        _fenced(chunks),
        chunks.c.number == bindparam("place"),
    )
    .values(data=None, tombstoned_by=bindparam("by"))
)
chunk_numbers = select(chunks.c.number).where(_fenced(chunks))
tombstone_event = select(events.c.seq).where(
    of_session(events),
    events.c.seq == bindparam("place", type_=BigInteger),
    events.c.type == "BlobsTombstoned",
)
event_at = select(events.c.at).where(of_session(events), events.c.seq == bindparam("place", type_=BigInteger))
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
    delete(table).where(of_session(table)) for table in (turns, blobs, chunks, refused_replies, snapshots)
)
drop_snapshot = delete(snapshots).where(of_session(snapshots))
insert_snapshot = insert(snapshots)
