"""A write transaction on PostgreSQL, on the driver's connection itself.

All claims of a batch are one statement, and all its commits another. `held` locks the heads that fit, or leaves out
those that another transaction has locked. It sees their newest rows; all else it sees as it was when the statement
began. That is enough, because whoever changes a session raises its version. A log that a transaction wrote to which
began earlier, with other sessions, goes on behind that: none of its events is passed by a reader (`schema`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection
from sqlalchemy.sql import Executable, Insert

from app.store import statements as sql
from app.store.dialect import ClaimRow, CommitRow, Compiler, ForEach, LogRow, Parameters, Row, StorePoints

LOCK_S = 5.0
"""How long to wait for a row that another transaction has locked."""

STATEMENT_S = 15.0
"""How long a statement may take before its connection counts as lost."""

COMMIT_S = 15.0
"""The same for a commit. It is not cancelled: PostgreSQL would report a commit that waits for a synchronous standby as
done."""

IDLE_S = 10.0
"""How long a frozen process can keep its rows locked."""

BEGIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = 0; "
    "SET LOCAL enable_seqscan = off; SET LOCAL plan_cache_mode = force_generic_plan; "
    f"SET LOCAL lock_timeout = {LOCK_S * 1000:.0f}; SET LOCAL idle_in_transaction_session_timeout = {IDLE_S * 1000:.0f}"
)
"""Writers look up rows by key; without statistics the planner of a new table would choose scans. The server does not
time out commits: it would report one that waits for a standby as done."""

SYNCED = BEGIN + "; SET LOCAL synchronous_commit = on"
NOT_SYNCED = BEGIN + "; SET LOCAL synchronous_commit = off"

TAKE = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text::bigint[], $3::text::int[], $4::text::int[], $5::text::int[],
        $6::text::float8[], $7::text::int[], $8::text::bigint[], $9::text[], $10::text[], $11::text[],
        $12::text::float8[], $13::text::bigint[], $14::text::smallint[], $15::bytea[])
    AS t(sid, known, known_turns, most, turn, known_at, parent, incarnation, body_hash, retry_key, adapter, at,
        reserved, version, data)
), held AS (
    SELECT g.*, e.tx FROM given g
    JOIN sessions s ON s.session_id = g.sid
    -- The time of the last event tells logs of one length apart: a crash of the server may undo claims, which are not
    -- synced, and other events then take their places.
    JOIN events e ON e.session_id = g.sid AND e.seq = g.known AND e.at = g.known_at
    WHERE s.version = g.known AND s.turns = g.known_turns AND s.open_turns < g.most AND s.last_turn = g.turn - 1
        AND s.status = 'open'
    FOR UPDATE OF s SKIP LOCKED
), taken AS (
    UPDATE sessions s SET version = s.version + 1, open_turns = s.open_turns + 1, last_turn = s.last_turn + 1
    FROM held h WHERE s.session_id = h.sid
    RETURNING h.*
), opened AS (
    INSERT INTO open_turns
        (session_id, fence, turn, parent_turn, incarnation, body_hash, retry_key, adapter, opened_at, reserved)
    SELECT sid, known + 1, turn, parent, incarnation, body_hash, retry_key, adapter, at, reserved FROM taken
), logged AS (
    INSERT INTO events (session_id, seq, type, version, at, data, tx)
    SELECT sid, known + 1, 'TurnOpened', version, at, data, GREATEST(pg_current_xact_id()::text::bigint, tx) FROM taken
)
SELECT sid FROM taken
"""
ADVANCE = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text::bigint[], $3::text::int[], $4::text::bigint[], $5::text::bigint[],
        $6::text::float8[], $7::text::int[], $8::text::float8[], $9::text::bigint[], $10::text[], $11::text::int[],
        $12::text::int[], $13::text::int[], $14::text::int[], $15::text::smallint[], $16::text[], $17::bytea[],
        $18::bytea[])
    AS t(sid, known, known_turns, fence, incarnation, opened_at, count, at, weight, engine, tool_errors, turn, parent,
        segment, choice_index, protocol, tokens, exchange)
), new_events AS (
    SELECT * FROM unnest($19::text[], $20::text::bigint[], $21::text[], $22::text::smallint[], $23::text::float8[],
        $24::bytea[])
    AS t(sid, seq, type, version, at, data)
), held AS (
    SELECT g.*, e.tx FROM given g
    JOIN sessions s ON s.session_id = g.sid
    JOIN events e ON e.session_id = g.sid AND e.seq = g.known
    WHERE s.version = g.known AND s.turns = g.known_turns
        -- It tells claims under one fence apart: the fence of one that a crash has undone is given again.
        -- No join: a plan that was made while few turns were open would read all that are open.
        AND g.opened_at = (SELECT opened_at FROM open_turns o
            WHERE o.session_id = g.sid AND o.fence = g.fence AND o.incarnation = g.incarnation)
    FOR UPDATE OF s SKIP LOCKED
), advanced AS (
    UPDATE sessions s SET version = s.version + h.count, open_turns = s.open_turns - 1, turns = s.turns + 1,
        updated_at = h.at, weight_version = GREATEST(s.weight_version, h.weight), engine = h.engine,
        tool_errors = s.tool_errors + h.tool_errors
    FROM held h WHERE s.session_id = h.sid
    RETURNING h.*
), freed AS (
    DELETE FROM open_turns o USING advanced a WHERE o.session_id = a.sid AND o.fence = a.fence
), content AS (
    INSERT INTO turns (session_id, turn, parent_turn, segment, choice_index, protocol, tokens, exchange)
    SELECT sid, turn, parent, segment, choice_index, protocol, tokens, exchange FROM advanced
), logged AS (
    INSERT INTO events (session_id, seq, type, version, at, data, tx)
    SELECT n.sid, n.seq, n.type, n.version, n.at, n.data, GREATEST(pg_current_xact_id()::text::bigint, a.tx)
    FROM new_events n JOIN advanced a ON a.sid = n.sid
    ORDER BY n.sid, n.seq
)
SELECT sid FROM advanced
"""


class LastEvent(NamedTuple):
    """The last event of a transaction: it is in the log exactly if the transaction was committed."""

    session_id: str
    seq: int
    data: bytes
    at: float


class PostgresTx:
    """A transaction on the driver's own connection, called from a greenlet as if it were synchronous."""

    is_remote = True
    positions = None

    def __init__(self, connection: Connection, compiler: Compiler, points: StorePoints) -> None:
        self.points = points
        self._connection: Any = connection.connection.dbapi_connection
        self._bind = compiler.bind
        self._locked: frozenset[str] = frozenset()
        self.last_event: LastEvent | None = None

    def one(self, statement: Executable, parameters: Parameters) -> Row | None:
        text, values = self._bind(statement, parameters)
        row = self._call(lambda raw: raw.fetchrow(text, *values, timeout=STATEMENT_S))
        return None if row is None else tuple(row)

    def all(self, statement: Executable, parameters: Parameters) -> Sequence[Row]:
        text, values = self._bind(statement, parameters)
        return [tuple(row) for row in self._call(lambda raw: raw.fetch(text, *values, timeout=STATEMENT_S))]

    def run(self, statement: Executable, parameters: Parameters) -> int:
        text, values = self._bind(statement, parameters)
        status: str = self._call(lambda raw: raw.execute(text, *values, timeout=STATEMENT_S))
        return int(status.rpartition(" ")[2])

    def run_all(self, statement: Executable, parameters: Sequence[Parameters]) -> None:
        if parameters:
            text = self._bind(statement, parameters[0])[0]
            values = [self._bind(statement, row)[1] for row in parameters]
            self._call(lambda raw: raw.executemany(text, values, timeout=STATEMENT_S))

    def each(self, statement: ForEach, rows: Sequence[dict[str, Any]]) -> Sequence[Row]:
        return self.all(statement.many, {name: [row[name] for row in rows] for name in rows[0]}) if rows else ()

    def insert(self, statement: Insert, rows: Sequence[dict[str, Any]]) -> None:
        if not rows:
            return
        columns = tuple(rows[0])
        text = self._bind(statement, rows[0], columns)[0]
        values = [self._bind(statement, row, columns)[1] for row in rows]
        if len(rows) == 1:
            self._call(lambda raw: raw.execute(text, *values[0], timeout=STATEMENT_S))
        else:
            self._call(lambda raw: raw.executemany(text, values, timeout=STATEMENT_S))
        if statement is sql.insert_event:
            self.last_event = LastEvent(*(rows[-1][name] for name in LastEvent._fields))

    def lock(self, statement: Executable, parameters: Parameters) -> None:
        if parameters["sid"] not in self._locked:
            self.one(statement, parameters)

    def add_locked(self, session_ids: Collection[str]) -> None:
        self._locked = frozenset(session_ids)

    def open_turns(self, opened: Sequence[ClaimRow]) -> Collection[str]:
        taken = self._written(TAKE, zip(*opened, strict=True))
        if last := next((one for one in reversed(opened) if one.session_id in taken), None):
            self.last_event = LastEvent(last.session_id, last.known + 1, last.data, last.at)
        return taken

    def commit_turns(self, committed: Sequence[CommitRow], log: Sequence[LogRow]) -> Collection[str]:
        advanced = self._written(ADVANCE, (*zip(*committed, strict=True), *zip(*log, strict=True)))
        if last := next((event for event in reversed(log) if event.session_id in advanced), None):
            self.last_event = LastEvent(last.session_id, last.seq, last.data, last.at)
        return advanced

    def _written(self, text: str, columns: Iterable[Sequence[Any]]) -> set[str]:
        values = [_parameter(column) for column in columns]
        return {row[0] for row in self._call(lambda raw: raw.fetch(text, *values, timeout=STATEMENT_S))}

    def begin(self, durable: bool) -> None:
        self._call(lambda raw: raw.execute(SYNCED if durable else NOT_SYNCED, timeout=STATEMENT_S))

    def rollback(self) -> None:
        self._call(lambda raw: raw.execute("ROLLBACK", timeout=STATEMENT_S))

    def commit(self) -> None:
        self._call(_commit)

    def _call(self, request: Callable[[Any], Awaitable[Any]]) -> Any:
        return self._connection.run_async(request)


def _parameter(column: Sequence[Any]) -> Sequence[Any] | None:
    """A column's values, for `unnest`: numbers as the text of an array, {1,2,null}. The driver asks of each element of
    a list whether it is a list itself, which for a number takes longer than to spell it."""
    first = column[0]
    if first is None:
        first = next((value for value in column if value is not None), None)
        if first is None:
            return None
    return f"{{{msgspec.json.encode(column)[1:-1].decode()}}}" if isinstance(first, (int, float)) else column


async def _commit(raw: Any) -> None:
    """COMMIT. If it takes too long, its connection is closed instead of cancelling it."""
    committing = asyncio.ensure_future(raw.execute("COMMIT"))
    committing.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait({committing}, timeout=COMMIT_S)
    finally:
        if not committing.done():
            raw.terminate()
    await committing
