"""Copies what can be read of a damaged SQLite store, without hiding what is lost.

A lost head or claim is derived from the log. A lost event becomes a row that cannot be decoded, so that the session
stays unreadable in the copy. Lost content is left out; the log still describes it. Snapshots, the tokens of turns in
flight and the search index are not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Connection, Select, Table, func, insert, select, tuple_

from app.domain.events import TurnCommitted, UnknownEvent
from app.store import projections as heads
from app.store.damaged import attempt, attempt_or, rows_in_parts, session_ids
from app.store.dialect import AlchemyTx
from app.store.projections import FoldedLog
from app.store.reads import EventRow, decode_events
from app.store.rollouts import root_in_logs
from app.store.schema import (
    blobs,
    chunks,
    events,
    group_changes,
    groups,
    metadata,
    open_turns,
    refused_replies,
    search_entries,
    search_metadata,
    search_shards,
    search_state,
    sessions,
    snapshots,
    staged_tokens,
    store_meta,
    turns,
)

CONTENT: Sequence[Table] = (turns, blobs, chunks, refused_replies)
OF_SESSIONS: Sequence[Table] = (sessions, events, open_turns, *CONTENT)
NOT_COPIED: Sequence[Table] = (
    snapshots,
    staged_tokens,
    search_entries,
    search_metadata,
    search_shards,
    search_state,
)

PAGE = 256
"""Rows of a table that is of no session, read at a time."""

FIRST_EPOCH = "1"
"""Of a store whose own cannot be read; a restore makes another of it, which no cursor has."""

MOST_LOST = 100_000
"""Events that a log may lack; a head that says more is itself not what it was."""

Fields = dict[str, Any]
Report = Callable[[str], None]


class Damage(msgspec.Struct):
    """What cannot be read. Of a session: the names of the tables that have lost rows of it."""

    tables: list[str] = []
    sessions: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self.tables or self.sessions)


def find(connection: Connection, report: Report) -> Damage:
    """Search for damage, table by table and session by session."""
    found = Damage()
    names = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
    for name in attempt(connection, lambda again: list(again.exec_driver_sql(names).scalars())):
        report(f"looking for damage in table {name}")
        if not _is_sound(connection, name):
            found.tables.append(name)
    if found.tables:
        for session_id in session_ids(connection, OF_SESSIONS):
            report(f"looking for damage in session {session_id}")
            lost = [table.name for table in OF_SESSIONS if not _can_be_read(connection, table, session_id)]
            if lost:
                found.sessions[session_id] = lost
    return found


def _is_sound(connection: Connection, table: str) -> bool:
    check = f'PRAGMA integrity_check("{table}")'
    return attempt_or(connection, lambda again: again.exec_driver_sql(check).scalars().all(), None) == ["ok"]


def _can_be_read(connection: Connection, table: Table, session_id: str) -> bool:
    query = select(table).where(table.c.session_id == session_id)
    return attempt_or(connection, lambda again: again.execute(query).all(), None) is not None


def copy_readable(source: Connection, target: Connection, report: Report) -> Damage:
    """Fill the empty tables of `target`; returns what is missing in them."""
    return _Copy(source, target).run(report)


class _Copy:
    def __init__(self, source: Connection, target: Connection) -> None:
        self._source = source
        self._target = target
        self._damage = Damage()
        self._markers: list[Fields] = []
        self._last_position = 0

    def run(self, report: Report) -> Damage:
        for table in metadata.sorted_tables:
            if table not in NOT_COPIED and table not in OF_SESSIONS:
                report(f"table {table.name}")
                self._table(table)
        every = session_ids(self._source, OF_SESSIONS)
        for number, session_id in enumerate(every, 1):
            report(f"{number} of {len(every)} sessions")
            self._session(session_id)
        # Behind all others, so that whoever reads on learns of the loss.
        for marker in self._markers:
            self._last_position += 1
            self._insert(events, [{**marker, "position": self._last_position}])
        self._note_groups()
        return self._damage

    def _insert(self, table: Table, rows: Sequence[Fields]) -> None:
        for row in rows:
            self._target.execute(insert(table).prefix_with("OR IGNORE"), row)

    def _table(self, table: Table) -> None:
        """A table that is of no session: from both its ends to what cannot be read."""
        rows: list[Fields] = []
        for descending in (False, True):
            found, is_whole = _walked(self._source, table, descending)
            rows += found
            if is_whole:
                break
        else:
            self._damage.tables.append(table.name)
        self._insert(table, rows)
        if table is store_meta and not any(row["key"] == "epoch" for row in rows):
            self._insert(store_meta, [{"key": "epoch", "value": FIRST_EPOCH}])

    def _session(self, session_id: str) -> None:
        lost: list[str] = []
        head = self._head(session_id)
        log = self._events(session_id)
        version = self._version(session_id, head, log)
        missing = sorted(set(range(1, version + 1)) - {row["seq"] for row in log})
        if not log and not missing and head is None:
            missing = [1]
        folded = None if missing else _folded(self._source, session_id, log)
        if missing:
            lost.append(events.name)
        if head is None:
            head = self._derived_head(session_id, log, missing, folded)
        self._insert(sessions, [head])
        self._insert(events, log)
        at = log[-1]["at"] if log else head["created_at"]
        self._markers += [_lost_event(session_id, seq, at) for seq in missing]
        self._last_position = max([self._last_position, *(row["position"] for row in log)])
        self._claims(session_id, folded)
        lost += [table.name for table in CONTENT if not self._content(table, session_id, folded)]
        if lost:
            self._damage.sessions[session_id] = lost

    def _head(self, session_id: str) -> Fields | None:
        return next(iter(self._rows(sessions, session_id) or []), None)

    def _rows(self, table: Table, session_id: str) -> list[Fields] | None:
        """None where they cannot all be read."""
        query = select(table).where(table.c.session_id == session_id)
        return attempt_or(self._source, lambda again: _fields(again, query), None)

    def _events(self, session_id: str) -> list[Fields]:
        rows = self._rows(events, session_id)
        if rows is None:
            own = events.c.session_id == session_id

            def read(again: Connection, first: int, last: int) -> list[Fields]:
                return _fields(again, select(events).where(own, events.c.seq.between(first, last)))

            rows, _ = rows_in_parts(self._source, 1, self._last_seq(session_id) or 0, read)
        sound = [row for row in rows if _is_event(row)]
        return sorted({row["seq"]: row for row in sound}.values(), key=lambda row: row["seq"])

    def _last_seq(self, session_id: str) -> int | None:
        """By the index over the key; None where that cannot be read."""
        query = select(func.max(events.c.seq)).where(events.c.session_id == session_id)
        found = attempt_or(self._source, lambda again: again.execute(query).scalar() or 0, None)
        return found if found is None or isinstance(found, int) else 0

    def _version(self, session_id: str, head: Fields | None, log: Sequence[Fields]) -> int:
        """The number of the last event that there was, or one more than is known where nobody says."""
        known = log[-1]["seq"] if log else 0
        indexed = self._last_seq(session_id)
        if head is not None and isinstance(head["version"], int) and head["version"] <= known + MOST_LOST:
            return max(known, head["version"])
        return known + 1 if indexed is None else max(known, min(indexed, known + MOST_LOST))

    def _derived_head(
        self, session_id: str, log: Sequence[Fields], missing: Sequence[int], folded: FoldedLog | None
    ) -> Fields:
        """What the log says; of one that cannot be read, a head by which the session is known and not written to."""
        if folded is not None:
            return {"session_id": session_id, **heads.head_row(folded)}
        times = [row["at"] for row in log] or [0.0]
        return {
            "session_id": session_id,
            "version": max([*missing, *(row["seq"] for row in log)], default=1),
            "status": "closed",
            "open_turns": 0,
            "turns": 0,
            "created_at": times[0],
            "updated_at": times[-1],
            "closed_at": times[-1],
            "body_hash": "",
        }

    def _claims(self, session_id: str, folded: FoldedLog | None) -> None:
        rows = self._rows(open_turns, session_id)
        if rows is None and folded is not None:
            rows = [{"session_id": session_id, "fence": fence, **row} for fence, row in heads.open_rows(folded).items()]
        self._insert(open_turns, rows or [])

    def _content(self, table: Table, session_id: str, folded: FoldedLog | None) -> bool:
        """Copy a session's rows of a table; was it all of them?"""
        rows = self._rows(table, session_id)
        if rows is not None:
            self._insert(table, rows)
            return True
        rows = list(self._readable(table, session_id))
        self._insert(table, rows)
        if table is chunks and folded is not None:
            # One that is not there at all would pass for tombstoned.
            self._insert(chunks, list(_lost_chunks(session_id, folded)))
        return False

    def _readable(self, table: Table, session_id: str) -> Iterator[Fields]:
        """Row by row, where the index over the key says which there are."""
        key = tuple_(*table.primary_key.columns)
        keys = select(*table.primary_key.columns).where(table.c.session_id == session_id)
        for one in attempt_or(self._source, lambda again: again.execute(keys).all(), ()):
            query = select(table).where(key == tuple(one))
            yield from attempt_or(self._source, lambda again: _fields(again, query), ())  # noqa: B023

    def _note_groups(self) -> None:
        """Groups whose rows are lost are counted again, from their sessions."""
        known = select(groups.c.group_id)
        query = select(sessions.c.group_id).where(sessions.c.group_id.is_not(None), sessions.c.group_id.not_in(known))
        noted = [{"group_id": group_id} for group_id in self._target.execute(query.distinct()).scalars()]
        if noted:
            self._target.execute(insert(group_changes), noted)


def _walked(connection: Connection, table: Table, descending: bool) -> tuple[list[Fields], bool]:
    """The rows by their key until one cannot be read; are they all?"""
    key = list(table.primary_key.columns)
    found: list[Fields] = []
    limit = PAGE
    while True:
        query = select(table).order_by(*(one.desc() if descending else one for one in key)).limit(limit)
        if found:
            last = tuple(found[-1][one.name] for one in key)
            place = tuple_(*key)
            query = query.where(place < last if descending else place > last)
        page = attempt_or(connection, lambda again: _fields(again, query), None)  # noqa: B023
        if page is None:
            if limit == 1:
                return found, False
            limit = max(1, limit // 8)
            continue
        found += page
        if len(page) < limit:
            return found, True


def _fields(connection: Connection, query: Select[Any]) -> list[Fields]:
    return [dict(row) for row in connection.execute(query).mappings()]


def _is_event(row: Mapping[str, Any]) -> bool:
    kinds = {"seq": int, "position": int, "tx": int, "at": float, "type": str, "version": int, "data": bytes}
    return all(isinstance(row[name], kind) for name, kind in kinds.items())


def _folded(source: Connection, session_id: str, log: Sequence[Fields]) -> FoldedLog | None:
    rows = [EventRow(row["seq"], row["at"], row["type"], row["version"], row["data"]) for row in log]
    try:
        return heads.folded(session_id, decode_events(rows), partial(_root, source))
    except UnknownEvent:
        return None


def _root(source: Connection, session_id: str, parent: str | None) -> str | None:
    """The parent, where the log of one above it cannot be read."""
    return attempt_or(source, lambda again: root_in_logs(AlchemyTx(again), session_id, parent), parent)


def _lost_event(session_id: str, seq: int, at: float) -> Fields:
    """A row that cannot be decoded, of a type that exports look for."""
    return {
        "session_id": session_id,
        "seq": seq,
        "type": TurnCommitted.__name__,
        "version": 1,
        "at": at,
        "data": b"",
        "tx": 0,
    }


def _lost_chunks(session_id: str, log: FoldedLog) -> Iterator[Fields]:
    """Every live chunk of the log, without its content; those that were copied stay as they are."""
    needed = {
        chunk.key: (payload.kind, chunk)
        for live in log.session.every_payload.values()
        for payload in live
        for chunk in payload.chunks
    }
    for (fence, number), (kind, chunk) in needed.items():
        yield {
            "session_id": session_id,
            "fence": fence,
            "number": number,
            "kind": kind,
            "size": chunk.size,
            "hash": chunk.hash,
            "data": b"",
        }
