"""Checkpoints: named cuts over the sessions and groups of a run, or of all, and taking them back to one.

    Make             the last event of each session, and the rows of `groups`, in one transaction
    RestoreSession   a session is again what it was: events in its log, one transaction each
    RestoreGroups    leases and acknowledgements are again what they were, some groups a transaction
    FinishRestore    the epoch of the run, or of the store, is raised

The statement that copies the heads sees the store at one moment. Groups change only in transactions that keep the pins
(`store.pins`), so their rows are of that moment too. Every step of a restore can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    String,
    Table,
    and_,
    bindparam,
    delete,
    false,
    func,
    insert,
    or_,
    select,
    tuple_,
    update,
)

from app.crash_points import reach
from app.domain.events import Event
from app.domain.groups import GroupKey
from app.domain.patterns import ALL_RUNS
from app.features.checkpoints.schema import checkpoint_groups, checkpoint_sessions, checkpoints
from app.features.groups.schema import group_changes, groups
from app.store import pins, rollouts
from app.store import statements as sql
from app.store.dialect import Tx, now
from app.store.feed import raise_epoch, raise_epochs
from app.store.log import Appended, BaseOperation, Refused, abandon, advance_head, end_staging, holders_of
from app.store.schema import sessions

Cut = Literal["now", "drain", "restore"]
"""How a checkpoint was made: at once; after the turns in flight had ended; by a restore, of what it replaced."""

_id = bindparam("id", type_=BigInteger)
_after = bindparam("after", type_=String)
_most = bindparam("most", type_=BigInteger)


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint of a run, or (ALL_RUNS) of the whole store. `created_at` is in seconds since the epoch by the
    database's clock; `sessions` and `groups` count what is in it, `erased` the sessions whose content has been erased
    since. `restores`: it keeps what there was before that one was restored. `metadata` is JSON."""

    id: int
    run: str
    name: str
    state: Literal["made", "restoring"]
    cut: Cut
    created_at: float
    sessions: int
    groups: int
    restores: str | None
    metadata: bytes | None
    erased: int = 0


_COLUMNS = tuple(checkpoints.c[name] for name in Checkpoint.__struct_fields__[:-1])
_is_named = and_(checkpoints.c.run == bindparam("of_run"), checkpoints.c.name == bindparam("named"))
_named = select(*_COLUMNS).where(_is_named)
_insert = (
    insert(checkpoints)
    .values(
        run=bindparam("of_run"),
        name=bindparam("named"),
        state=bindparam("as_state"),
        cut=bindparam("as_cut"),
        created_at=now(),
        sessions=0,
        groups=0,
        restores=bindparam("of"),
        metadata=bindparam("given", type_=checkpoints.c.metadata.type),
    )
    .returning(checkpoints.c.id)
)
_ours = bindparam("of_run", type_=String)


def _is_of(table: Table) -> ColumnElement[bool]:
    return or_(_ours == ALL_RUNS, table.c.run == _ours)


_copied_heads = select(sessions.c.session_id, _id, sessions.c.version, false()).where(_is_of(sessions))
_SESSION_COLUMNS = ["session_id", "checkpoint_id", "seq", "is_done"]
_copy_sessions = insert(checkpoint_sessions).from_select(_SESSION_COLUMNS, _copied_heads.where(sql.has_rows))
_copy_all_sessions = insert(checkpoint_sessions).from_select(
    _SESSION_COLUMNS, _copied_heads.where(sessions.c.status != "erased")
)
_copy_groups = insert(checkpoint_groups).from_select(
    ["checkpoint_id", *groups.columns.keys()], select(_id, *groups.columns).where(_is_of(groups))
)
_count = (
    update(checkpoints).where(checkpoints.c.id == _id).values(sessions=bindparam("held"), groups=bindparam("grouped"))
)


class NameTaken(msgspec.Struct, frozen=True):
    """Nothing was made: another checkpoint has the name."""


class Restoring(msgspec.Struct, frozen=True):
    """Nothing was done: the run, or the store, is being taken back to a checkpoint."""


class Missing(msgspec.Struct, frozen=True):
    """Nothing was made: there is no such checkpoint to restore. Once one is made for a restore, it cannot be
    deleted."""


class Make(BaseOperation, frozen=True):
    """Make a checkpoint of a run (ALL_RUNS: of the store) as it is. `restores`: it keeps what a restore of that
    checkpoint replaces. `metadata` is JSON."""

    run: str
    name: str
    cut: Cut
    restores: str | None = None
    metadata: bytes | None = None

    def apply(self, tx: Tx) -> Checkpoint | NameTaken | Restoring | Missing:
        pins.change(tx)
        if self.restores is not None and tx.one(_named, {"of_run": self.run, "named": self.restores}) is None:
            return Missing()
        if tx.one(_named, {"of_run": self.run, "named": self.name}) is not None:
            return NameTaken()
        if pins.is_restoring(tx, self.run):
            return Restoring()
        state = "made" if self.restores is None else "restoring"
        new = {"named": self.name, "as_state": state, "as_cut": self.cut, "of": self.restores, "given": self.metadata}
        row = tx.one(_insert, {"of_run": self.run, **new})
        assert row is not None
        copied = {"id": row[0], "of_run": self.run}
        held = tx.run(_copy_sessions if self.restores is None else _copy_all_sessions, copied)
        grouped = tx.run(_copy_groups, copied)
        tx.run(_count, {"id": row[0], "held": held, "grouped": grouped})
        reach("in_checkpoint")
        made = tx.one(_named, {"of_run": self.run, "named": self.name})
        assert made is not None
        return Checkpoint(*made)


def named(connection: Connection, run: str, name: str) -> Checkpoint | None:
    row = connection.execute(_named, {"of_run": run, "named": name}).first()
    return None if row is None else Checkpoint(*row)


def every(connection: Connection, run: str | None = None) -> list[Checkpoint]:
    """The checkpoints of a run, of the whole store (ALL_RUNS), or (None) all, the newest last."""
    query = select(*_COLUMNS).where(checkpoints.c.name.is_not(None)).order_by(checkpoints.c.id)
    if run is not None:
        query = query.where(checkpoints.c.run == run)
    by_time = [Checkpoint(*row) for row in connection.execute(query)]
    gone = (
        select(checkpoint_sessions.c.checkpoint_id, func.count())
        .join_from(checkpoint_sessions, sessions, sessions.c.session_id == checkpoint_sessions.c.session_id)
        .where(sessions.c.status == "erased")
        .group_by(checkpoint_sessions.c.checkpoint_id)
    )
    erased = {row[0]: row[1] for row in connection.execute(gone)}
    return [msgspec.structs.replace(one, erased=erased.get(one.id, 0)) for one in by_time]


def erased(connection: Connection, checkpoint_id: int) -> list[str]:
    """The sessions of a checkpoint whose content has been erased since, by id."""
    query = (
        select(checkpoint_sessions.c.session_id)
        .join_from(checkpoint_sessions, sessions, sessions.c.session_id == checkpoint_sessions.c.session_id)
        .where(checkpoint_sessions.c.checkpoint_id == checkpoint_id, sessions.c.status == "erased")
        .order_by(checkpoint_sessions.c.session_id)
    )
    return list(connection.execute(query).scalars())


# Deleting.

_unname = (
    update(checkpoints).where(_is_named).values(name=None, state="deleting", metadata=None).returning(checkpoints.c.id)
)
_deleting = select(checkpoints.c.id).where(checkpoints.c.state == "deleting").order_by(checkpoints.c.id).limit(1)
_some_rows = (
    select(checkpoint_sessions.c.session_id)
    .where(checkpoint_sessions.c.checkpoint_id == _id, checkpoint_sessions.c.session_id > _after)
    .order_by(checkpoint_sessions.c.session_id)
    .limit(_most)
)
_drop_rows = delete(checkpoint_sessions).where(
    checkpoint_sessions.c.checkpoint_id == _id,
    checkpoint_sessions.c.session_id > _after,
    checkpoint_sessions.c.session_id <= bindparam("upto"),
)
_drop_groups = delete(checkpoint_groups).where(checkpoint_groups.c.checkpoint_id == _id)
_drop = delete(checkpoints).where(checkpoints.c.id == _id)


class Delete(BaseOperation, frozen=True):
    """Delete a checkpoint: it pins nothing any more. Its rows go later (`DropRows`). Was there one of this name?"""

    run: str
    name: str

    def apply(self, tx: Tx) -> bool | Restoring:
        if pins.is_restoring(tx, self.run):
            return Restoring()
        return tx.one(_unname, {"of_run": self.run, "named": self.name}) is not None


class DropRows(BaseOperation, frozen=True):
    """Delete up to `most` rows of deleted checkpoints, of sessions after `after`; the last of these sessions.

    An empty text: one checkpoint is done, begin with the next one. None: there are no more.
    """

    durable: ClassVar[bool] = False
    after: str
    most: int

    def apply(self, tx: Tx) -> str | None:
        row = tx.one(_deleting, {})
        if row is None:
            return None
        places = tx.all(_some_rows, {"id": row[0], "after": self.after, "most": self.most})
        if places:
            tx.run(_drop_rows, {"id": row[0], "after": self.after, "upto": places[-1][0]})
            last: str = places[-1][0]
            return last
        tx.run(_drop_groups, {"id": row[0]})
        tx.run(_drop, {"id": row[0]})
        return ""


# Restoring.

_then = checkpoint_sessions.alias("then")
_before = checkpoint_sessions.alias("before")
_changed = or_(
    and_(_then.c.seq.is_(None), sessions.c.status != "undone"),
    _then.c.seq != sessions.c.version,
    sessions.c.open_turns > 0,
)
_to_do = (
    select(sessions.c.session_id, func.coalesce(_then.c.seq, 0))
    .select_from(
        _before.join(sessions, sessions.c.session_id == _before.c.session_id).outerjoin(
            _then, and_(_then.c.session_id == _before.c.session_id, _then.c.checkpoint_id == bindparam("target"))
        )
    )
    .where(
        _before.c.checkpoint_id == bindparam("kept"),
        _before.c.session_id > _after,
        _before.c.is_done == false(),
        sessions.c.status != "erased",
        _changed,
    )
    .order_by(_before.c.session_id)
    .limit(_most)
)


def to_restore(
    connection: Connection, checkpoint_id: int, before_id: int, after: str, limit: int, *, of_roots: bool
) -> list[tuple[str, int]]:
    """Sessions after `after` that are not what they were at the checkpoint, and their last event in it (0: in none).
    `of_roots`: only those without a root."""
    given = {"target": checkpoint_id, "kept": before_id, "after": after, "most": limit}
    query = _to_do.where(sessions.c.root_id.is_(None)) if of_roots else _to_do
    return [(row[0], row[1]) for row in connection.execute(query, given)]


_set_head = (
    update(sessions)
    .where(sql.of_session(sessions))
    .values(
        status=bindparam("new_status"),
        closed_at=bindparam("new_closed_at", type_=sessions.c.closed_at.type),
        reward=bindparam("new_reward", type_=sessions.c.reward.type),
        turns=bindparam("new_turns"),
        weight_version=bindparam("new_weight_version", type_=sessions.c.weight_version.type),
        engine=bindparam("new_engine", type_=sessions.c.engine.type),
        note=bindparam("new_note", type_=sessions.c.note.type),
        tags=bindparam("new_tags", type_=sessions.c.tags.type),
        spent_turns=bindparam("new_spent_turns", type_=sessions.c.spent_turns.type),
        spent_tokens=bindparam("new_spent_tokens", type_=sessions.c.spent_tokens.type),
        failed=bindparam("new_failed", type_=sessions.c.failed.type),
        evaluation=bindparam("new_evaluation", type_=sessions.c.evaluation.type),
        annotated=bindparam("new_annotated", type_=sessions.c.annotated.type),
        engine_errors=bindparam("new_engine_errors"),
        tool_errors=bindparam("new_tool_errors"),
    )
    .returning(sessions.c.run, sessions.c.group_id, sessions.c.root_id)
)
_mark_done = (
    update(checkpoint_sessions)
    .where(checkpoint_sessions.c.session_id == bindparam("sid"), checkpoint_sessions.c.checkpoint_id == _id)
    .values(seq=bindparam("last"), is_done=True)
)


class Changed(msgspec.Struct, frozen=True):
    """Nothing was written: the session is no longer at the expected version."""


class RestoreSession(BaseOperation, frozen=True):
    """Take a session at version `expected` back, and end its claims. `head` are its row's new values.

    The checkpoint `before_id` keeps the state that is replaced.
    """

    session_id: str
    before_id: int
    expected: int
    at: float
    events: Sequence[Event]
    head: dict[str, Any]

    def apply(self, tx: Tx) -> Appended | Changed | Refused:
        tx.lock(sql.lock_head, {"sid": self.session_id})
        row = tx.one(sql.head, {"sid": self.session_id})
        if row is None or row[1] == "erased":
            return Refused(None if row is None else row[1])
        if row[0] != self.expected:
            return Changed()
        abandoned = abandon(tx, self.session_id, self.at, holders_of(tx, self.session_id), "restored")
        end_staging(tx, [(self.session_id, None)])
        new = {f"new_{name}": value for name, value in self.head.items()}
        named_by = tx.one(_set_head, {"sid": self.session_id, **new})
        assert named_by is not None
        rollouts.note(tx, *named_by)
        restored = advance_head(tx, self.session_id, self.at, self.events) if self.events else Appended(())
        tx.run(_mark_done, {"sid": self.session_id, "id": self.before_id, "last": self.expected})
        reach("in_restore")
        return Appended(abandoned.events + restored.events)


_KEY = groups.c.run, groups.c.group_id
_behind = tuple_(bindparam("after_run"), bindparam("after_group"))
_groups_after = select(*_KEY).where(tuple_(*_KEY) > _behind, _is_of(groups)).order_by(*_KEY).limit(_most)
_GROUP_COLUMNS = [column.name for column in groups.columns]
_place_then = tuple_(checkpoint_groups.c.run, checkpoint_groups.c.group_id)
_was = select(*(checkpoint_groups.c[name] for name in _GROUP_COLUMNS)).where(
    checkpoint_groups.c.checkpoint_id == _id,
    _place_then > _behind,
    _place_then <= tuple_(bindparam("upto_run"), bindparam("upto_group")),
)
_RESTORED = ("completed_at", "measured", "oldest_version", "consumer", "lease_until", "handed_out", "acked_at")
_NEVER_LEASED = {**dict.fromkeys(_RESTORED), "measured": False, "handed_out": 0}
_set_group = (
    update(groups)
    .where(groups.c.run == bindparam("of_run"), groups.c.group_id == bindparam("gid"))
    .values({name: bindparam(f"new_{name}", type_=groups.c[name].type) for name in _RESTORED})
)
_note = insert(group_changes)


class RestoreGroups(BaseOperation, frozen=True):
    """Take up to `most` groups of a run (ALL_RUNS: of all) after `after` back to a checkpoint; returns the last, None
    where there are no more.

    A group that was made later was never handed out. What follows from the sessions is computed again.
    """

    checkpoint_id: int
    run: str
    after: GroupKey
    most: int

    @property
    def size(self) -> int:
        return 256 * self.most

    def apply(self, tx: Tx) -> GroupKey | None:
        behind = {"after_run": self.after.run, "after_group": self.after.group_id}
        keys = [GroupKey(*row) for row in tx.all(_groups_after, {**behind, "of_run": self.run, "most": self.most})]
        if not keys:
            return None
        upto = {"upto_run": keys[-1].run, "upto_group": keys[-1].group_id}
        rows = tx.all(_was, {"id": self.checkpoint_id, **behind, **upto})
        was = {GroupKey(row[0], row[1]): dict(zip(_GROUP_COLUMNS, row, strict=True)) for row in rows}
        for key in keys:
            values = was.get(key, _NEVER_LEASED)
            new = {f"new_{name}": values[name] for name in _RESTORED}
            tx.run(_set_group, {"of_run": key.run, "gid": key.group_id, **new})
        tx.insert(_note, [key._asdict() for key in keys])
        return keys[-1]


_end = (
    update(checkpoints)
    .where(checkpoints.c.id == _id, checkpoints.c.state == "restoring")
    .values(state="made")
    .returning(checkpoints.c.id)
)


class FinishRestore(BaseOperation, frozen=True):
    """Raise the epoch of a run, or (ALL_RUNS) of the store, unless that was done. It ends the cursors of exports of the
    run and of all runs, or of every export.

    The log's epoch stays: no event was taken away, and positions hold.
    """

    before_id: int
    run: str

    def apply(self, tx: Tx) -> None:
        pins.change(tx)  # Else of two restores at once on PostgreSQL both add the epoch of exports of all runs.
        if tx.one(_end, {"id": self.before_id}) is not None:
            if self.run == ALL_RUNS:
                raise_epochs(tx)
            else:
                raise_epoch(tx, self.run)
                raise_epoch(tx, ALL_RUNS)
        reach("in_restore_finished")


class InCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that has a session, as it was after event `seq`."""

    run: str
    name: str
    created_at: float
    seq: int


class SessionThen(msgspec.Struct, frozen=True):
    """A session that a checkpoint has as it was after event `seq`; `version` and `status` are what it is now."""

    session_id: str
    seq: int
    version: int
    status: str
    run: str
    group_id: str | None


def of_session(connection: Connection, session_id: str) -> list[InCheckpoint]:
    """The checkpoints that have the session, the oldest first."""
    query = (
        select(checkpoints.c.run, checkpoints.c.name, checkpoints.c.created_at, checkpoint_sessions.c.seq)
        .join_from(checkpoint_sessions, checkpoints, checkpoints.c.id == checkpoint_sessions.c.checkpoint_id)
        .where(checkpoint_sessions.c.session_id == session_id, checkpoints.c.name.is_not(None))
        .order_by(checkpoints.c.id)
    )
    return [InCheckpoint(*row) for row in connection.execute(query)]


def content(
    connection: Connection, run: str, name: str, after: str, limit: int
) -> tuple[Checkpoint, list[SessionThen]] | None:
    """The checkpoint, and the next of its sessions by id after `after`; None if there is no such checkpoint.

    The rows are ordered by session, so a page reads those of the other checkpoints beside its own.
    """
    checkpoint = named(connection, run, name)
    if checkpoint is None:
        return None
    then = checkpoint_sessions.c
    query = (
        select(then.session_id, then.seq, *(sessions.c[name] for name in ("version", "status", "run", "group_id")))
        .join_from(checkpoint_sessions, sessions, sessions.c.session_id == then.session_id)
        .where(then.checkpoint_id == checkpoint.id, then.session_id > after)
        .order_by(then.session_id)
        .limit(limit)
    )
    return checkpoint, [SessionThen(*row) for row in connection.execute(query)]
