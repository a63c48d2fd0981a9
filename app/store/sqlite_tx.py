"""A write transaction on SQLite, on the driver's connection itself.

Statements are compiled once, and those of claims and commits, about seven a turn, are text with values in the order of
the columns: Core's cost for each would be most of the writer's time.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy.dialects import sqlite
from sqlalchemy.sql import Executable, Insert

from app.store.dialect import ClaimRow, CommitRow, Compiler, ForEach, LogRow, Parameters, Row, StorePoints

# A claim takes its head, and a commit advances it, exactly if the log ends where the process knows it to end. So the
# number of the next event is known, and a row count of 0 is the only other answer. What else is compared follows from
# that in a sound store.

TAKE = """
UPDATE sessions SET version = version + 1, open_turns = open_turns + 1, last_turn = last_turn + 1
WHERE session_id = ?1 AND version = ?2 AND turns = ?3 AND open_turns < ?4 AND last_turn = ?5 - 1 AND status = 'open'
    -- The time of the last event (`last_event_at`) tells logs of one length apart: a crash of the machine may undo
    -- claims, which are not synced, and other events then take their places.
    AND EXISTS (SELECT 1 FROM events WHERE session_id = ?1 AND seq = ?2 AND at = ?6)
"""
ADVANCE = """
UPDATE sessions SET version = version + ?7, open_turns = open_turns - 1, turns = turns + 1, updated_at = ?8,
    engine = ?9, tool_errors = tool_errors + ?10
WHERE session_id = ?1 AND version = ?2 AND turns = ?3
    -- `opened_at` tells claims under one fence apart: the fence of one that a crash has undone is given again.
    AND EXISTS (SELECT 1 FROM open_turns WHERE session_id = ?1 AND fence = ?4 AND incarnation = ?5 AND opened_at = ?6)
"""
WEIGH = """
-- By itself: SQLite writes to the index of a column that an update names, also where the value stays.
UPDATE sessions SET weight_version = ?2 WHERE session_id = ?1 AND (weight_version IS NULL OR weight_version < ?2)
"""
OPEN = """
INSERT INTO open_turns
    (session_id, fence, turn, parent_turn, incarnation, body_hash, retry_key, adapter, opened_at, reserved)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
FREE = """
DELETE FROM open_turns WHERE session_id = ? AND fence = ?
"""
CONTENT = """
INSERT INTO turns (session_id, turn, parent_turn, segment, choice_index, protocol, tokens, exchange)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
EVENT = """
INSERT INTO events (session_id, seq, type, version, at, data, tx, position) VALUES (?, ?, ?, ?, ?, ?, 0, ?)
"""


class SqliteTx:
    """Uses the driver's connection directly, with statements compiled once.

    `next_position` is the position of the next event. A rolled-back transaction leaves a gap, never a repetition.
    """

    is_remote = False

    def __init__(self, connection: sqlite3.Connection, next_position: int, points: StorePoints) -> None:
        self._cursor = connection.cursor()
        self.points = points
        self.positions = itertools.count(next_position)
        self._bind = Compiler(sqlite.dialect(paramstyle="qmark")).bind

    def one(self, statement: Executable, parameters: Parameters) -> Row | None:
        sql, values = self._bind(statement, parameters)
        row: Row | None = self._cursor.execute(sql, values).fetchone()
        self._cursor.fetchall()
        return row

    def all(self, statement: Executable, parameters: Parameters) -> Sequence[Row]:
        sql, values = self._bind(statement, parameters)
        return self._cursor.execute(sql, values).fetchall()

    def run(self, statement: Executable, parameters: Parameters) -> int:
        sql, values = self._bind(statement, parameters)
        return self._cursor.execute(sql, values).rowcount

    def run_all(self, statement: Executable, parameters: Sequence[Parameters]) -> None:
        for row in parameters:
            self.run(statement, row)

    def each(self, statement: ForEach, rows: Sequence[dict[str, Any]]) -> Sequence[Row]:
        return [result for row in rows for result in self.all(statement.single, row)]

    def insert(self, statement: Insert, rows: Sequence[dict[str, Any]]) -> None:
        if not rows:
            return
        columns = tuple(rows[0])
        sql, values = self._bind(statement, rows[0], columns)
        if len(rows) == 1:
            self._cursor.execute(sql, values)
        else:
            self._cursor.executemany(sql, [self._bind(statement, row, columns)[1] for row in rows])

    def lock(self, statement: Executable, parameters: Parameters) -> None:
        return

    def add_locked(self, session_ids: Collection[str]) -> None:
        return

    # Each claim and commit takes or advances its head by one conditional update; the rows of all that fit follow, one
    # `executemany` a table.

    def open_turns(self, opened: Sequence[ClaimRow]) -> Collection[str]:
        execute = self._cursor.execute
        taken = [one for one in opened if execute(TAKE, one[:6]).rowcount == 1]
        if taken:
            opened_rows, log = [], []
            for one in taken:
                fence = one.known + 1
                opened_rows.append((one.session_id, fence, one.turn, *one[6:13]))
                log.append((one.session_id, fence, "TurnOpened", one.version, one.at, one.data, next(self.positions)))
            self._cursor.executemany(OPEN, opened_rows)
            self._cursor.executemany(EVENT, log)
        return {one.session_id for one in taken}

    def commit_turns(self, committed: Sequence[CommitRow], log: Sequence[LogRow]) -> Collection[str]:
        execute, many = self._cursor.execute, self._cursor.executemany
        advanced = [one for one in committed if execute(ADVANCE, (*one[:8], *one[9:11])).rowcount == 1]
        ids = {one.session_id for one in advanced}
        if advanced:
            many(WEIGH, [(one.session_id, one.weight_version) for one in advanced if one.weight_version is not None])
            many(FREE, [(one.session_id, one.fence) for one in advanced])
            many(CONTENT, [(one.session_id, *one[11:]) for one in advanced])
            many(EVENT, [(*event, next(self.positions)) for event in log if event.session_id in ids])
        return ids
