"""What the sender of webhooks reads and writes: each receiver's cursor, and what follows it in the log."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal, cast
from urllib.parse import quote

import msgspec
from sqlalchemy import Connection, bindparam, delete, insert, or_, select, update

from app.crash_points import reach
from app.domain.events import RewardAssigned, SessionClosed, SessionErased, TurnOpened
from app.domain.fleet import EngineDied
from app.domain.groups import GroupKey
from app.domain.selection import Selection
from app.features.groups.reads import attempts, with_metadata
from app.features.groups.rules import outcome
from app.store import feed
from app.store.content import matches
from app.store.damage import attempt_or
from app.store.dialect import Tx
from app.store.feed import EventFilter, PlacedRow, Position
from app.store.fleet import later
from app.store.incarnations import holds_lease
from app.store.log import BaseOperation
from app.store.rollouts import group
from app.store.schema import fleet_events, open_turns, sessions, store_meta

LEASE = "webhooks"

PREFIX = "webhook:"
"""Begins the keys of the cursors in `store_meta`."""

PAGE = 500
"""Events in one read."""

_FINISHING = (RewardAssigned.__name__, SessionClosed.__name__, SessionErased.__name__)
"""Types of the events by which a group may become complete."""


Kind = Literal["session.stuck", "group.complete", "engine.died"]


class Notice(msgspec.Struct, frozen=True):
    """`subject` are what tells it from every other of its kind in this `epoch` of the store, or of a group's run. `at`:
    when it happened, in ISO 8601; `page` where to look, below the page's address. `data` are ids, counts, times and
    reasons: no content."""

    kind: Kind
    epoch: str
    subject: tuple[str | int | float, ...]
    at: str
    data: dict[str, Any]
    page: str = ""

    @property
    def id(self) -> str:
        """The `webhook-id`. It follows from what happened, so a notice that is sent again has it again."""
        text = json.dumps([self.kind, self.epoch, *self.subject])
        return f"msg_{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def body(self, public_url: str | None) -> bytes:
        url = None if public_url is None else f"{public_url}/ui#/{self.page}"
        return msgspec.json.encode({"type": self.kind, "timestamp": self.at, "data": {**self.data, "url": url}})


class Cursor(msgspec.Struct, frozen=True):
    """How far a receiver has been told, in the log of this `epoch`.

    `finished`: which events have been looked at for groups that they complete; `quiet`: and which, so many seconds
    late, for sessions that did not go on. `fleet`: the number of the last event of the fleet's log.
    """

    epoch: str
    finished: Position
    quiet: Position
    fleet: int


class Pending(msgspec.Struct, frozen=True):
    """The notices up to `cursor`. `quiet_from`: before this time, in seconds since the epoch, no further event is old
    enough."""

    notices: list[Notice]
    cursor: Cursor
    quiet_from: float | None


def cursor_of(connection: Connection, receiver: str) -> Cursor | None:
    """None: the receiver has none, or one in another log, since a backup was restored."""
    query = select(store_meta.c.value).where(store_meta.c.key == PREFIX + receiver)
    value: str | None = connection.execute(query).scalar()
    found = None if value is None else msgspec.json.decode(value, type=Cursor)
    return found if found is not None and found.epoch == feed.log_epoch(connection) else None


def present(connection: Connection) -> Cursor:
    """Behind all that has happened."""
    last = feed.end(connection)
    newest = select(fleet_events.c.seq).order_by(fleet_events.c.seq.desc()).limit(1)
    return Cursor(feed.log_epoch(connection), last, last, connection.execute(newest).scalar() or 0)


def pending(
    connection: Connection,
    cursor: Cursor,
    upto: Position,
    old_before: float | None,
    wanted: Selection,
    shut: Collection[str | None] = (),
) -> Pending:
    """What follows the cursor, of at most PAGE events each. `old_before`: what was written earlier, and is the last of
    its session, is too old; None: nothing is looked at for that. `wanted`: only of such sessions, and of groups that
    have such a one, and of engines that serve the run. `shut`: of these runs a gate explains that a session did not go
    on; the first such session is waited for."""
    named = feed.epoch(connection)
    notices: list[Notice] = []
    fleet, finished, quiet, quiet_from = cursor.fleet, cursor.finished, cursor.quiet, None
    for placed in later(connection, EngineDied, fleet, PAGE):
        died, fleet = cast(EngineDied, placed.event), placed.seq
        if wanted.run is not None and died.run not in (None, wanted.run):
            continue
        told = {"engine": died.url, "run": died.run, "reason": died.reason}
        notices.append(Notice("engine.died", named, (died.url, fleet), _iso(placed.at), told))
    if finished < upto:
        page = feed.page(connection, finished, upto, EventFilter(_FINISHING, **wanted.run_and_group), PAGE)
        notices += attempt_or(connection, lambda again: _complete(again, page.rows, wanted), [])
        finished = max(finished, page.reached)
    if old_before is not None and quiet < upto:
        page = feed.page(connection, quiet, upto, EventFilter(**wanted.run_and_group), PAGE)
        young = next((row for row in page.rows if row.at is not None and row.at >= old_before), None)
        rows = page.rows if young is None else page.rows[: page.rows.index(young)]
        stuck = attempt_or(connection, lambda again: _stuck(again, rows, named, wanted), [])
        waiting = {notice.subject for notice in stuck if notice.data["run"] in shut}
        first = next((row for row in rows if row.row is not None and (row.session_id, row.row.seq) in waiting), None)
        if first is not None:
            rows = rows[: rows.index(first)]
        there = {(row.session_id, row.row.seq) for row in rows if row.row is not None}
        notices += [notice for notice in stuck if notice.subject in there]
        reached = page.reached if young is None and first is None else rows[-1].place if rows else quiet
        quiet, quiet_from = max(quiet, reached), young.at if young is not None and first is None else None
    return Pending(notices, Cursor(cursor.epoch, finished, quiet, fleet), quiet_from)


def _complete(connection: Connection, rows: Sequence[PlacedRow], wanted: Selection) -> list[Notice]:
    """The groups of these events' sessions that are complete."""
    at = {row.session_id: row.at or 0.0 for row in rows if row.session_id is not None}
    query = select(sessions.c.session_id, sessions.c.run, group().label("counts_in"))
    last: dict[GroupKey, float] = {}
    for session_id, run, group_id in connection.execute(query.where(sessions.c.session_id.in_(at))):
        if group_id is not None:
            key = GroupKey(run, group_id)
            last[key] = max(last.get(key, 0.0), at[session_id])
    fitting = with_metadata(connection, list(last), wanted.metadata) if wanted.metadata else last
    # A run that was restored, or erased, may complete a group of the same name and number again.
    epochs = {run: feed.cursor_epoch(connection, run) for run in {key.run for key in last}}
    notices = []
    for key, found in attempts(connection, [key for key in last if key in fitting]).items():
        outcome_of = outcome(found)
        if outcome_of.complete:
            told = {**key._asdict(), "rollouts": outcome_of.rollouts}
            page = f"group/{quote(key.group_id, safe='')}?run={quote(key.run)}"
            # The number tells it from what the group was before another rollout began.
            subject = (*key, outcome_of.rollouts)
            notices.append(Notice("group.complete", epochs[key.run], subject, _iso(last[key]), told, page))
    return notices


def _stuck(connection: Connection, rows: Iterable[PlacedRow], named: str, wanted: Selection) -> list[Notice]:
    """The sessions in which nothing has followed one of these events, or the turn that it opened has not ended."""
    events = {(row.session_id, row.row.seq): row for row in rows if row.row is not None}
    ids = {session_id for session_id, _ in events if session_id is not None}
    if wanted.metadata:
        ids = {session_id for session_id, fits in matches(connection, sorted(ids), wanted.metadata).items() if fits}
    query = (
        select(
            sessions.c.session_id,
            sessions.c.version,
            sessions.c.status,
            sessions.c.turns,
            sessions.c.run,
            group(),
            open_turns.c.fence,
            open_turns.c.turn,
        )
        .select_from(sessions.outerjoin(open_turns, open_turns.c.session_id == sessions.c.session_id))
        .where(sessions.c.session_id.in_(ids), or_(sessions.c.status == "open", open_turns.c.fence.is_not(None)))
    )
    notices = {}
    for session_id, version, status, turns, run, group_id, fence, turn in connection.execute(query):
        opened = events.get((session_id, fence))
        if opened is not None and opened.row is not None and opened.row.type == TurnOpened.__name__:
            row, reason, of = opened, "turn_in_flight", turn
        elif status == "open" and fence is None and (session_id, version) in events:
            row, reason, of = events[session_id, version], "no_progress", None
        else:
            continue
        assert row.row is not None
        told = {"session_id": session_id, "run": run, "group_id": group_id}
        told |= {"reason": reason, "turn": of, "turns": turns}
        subject, page = (session_id, row.row.seq), f"session/{quote(session_id, safe='')}"
        notices[subject] = Notice("session.stuck", named, subject, _iso(row.at or 0.0), told, page)
    return list(notices.values())


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_key = store_meta.c.key == bindparam("of")
_cursors = select(store_meta.c.key).where(store_meta.c.key.startswith(PREFIX, autoescape=True))
_forget = delete(store_meta).where(_key)
_add = insert(store_meta)
_set = update(store_meta).where(_key).values(value=bindparam("to"))


class BeginCursors(BaseOperation, frozen=True):
    """Give each receiver that has none a cursor at `present`, and forget those of all others."""

    receivers: Sequence[str]
    present: Cursor

    def apply(self, tx: Tx) -> None:
        wanted = {PREFIX + receiver for receiver in self.receivers}
        there = {row[0] for row in tx.all(_cursors, {})}
        for key in there - wanted:
            tx.run(_forget, {"of": key})
        value = msgspec.json.encode(self.present).decode()
        tx.insert(_add, [{"key": key, "value": value} for key in sorted(wanted - there)])


class MoveCursor(BaseOperation, frozen=True):
    """Everything up to the cursor has been delivered. False: another process has the lease.

    Not durable: a power cut has the notices sent again.
    """

    durable: ClassVar[bool] = False
    fence: int
    receiver: str
    cursor: Cursor

    def apply(self, tx: Tx) -> bool:
        if not holds_lease(tx, LEASE, self.fence):
            return False
        key, value = PREFIX + self.receiver, msgspec.json.encode(self.cursor).decode()
        if not tx.run(_set, {"of": key, "to": value}):
            tx.insert(_add, [{"key": key, "value": value}])
        reach("in_webhook_moved")
        return True
