"""Applies many operations in one transaction.

    claims and commits    of a session that is as their process knows it: a few statements for all of them
    the others            one kind as a set, where they are on different sessions; else one by one, in their order

So what each turn does is plain SQL with rows in the order of its columns, and each outcome other than success is told
by the operation itself (`log_turns`), which looks at the session again.

On PostgreSQL a head is locked without waiting, before anything else of its session. An operation on a head that another
transaction has locked is `DEFERRED` to a later batch. So no session waits for another's row, and two batches cannot
deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ARRAY, String, any_, bindparam, select

from app import crash_points
from app.domain.events import BlobsTombstoned, Recorded, TurnCommitted, encode
from app.store import staged_tokens
from app.store import statements as sql
from app.store.dialect import SqliteTx, Tx
from app.store.log import Appended, Operation, SetOperation, blob_row, chunk_row
from app.store.log_turns import Claim, Commit
from app.store.postgres import LastEvent, PostgresTx
from app.store.schema import sessions


class Deferred:
    """The outcome of an operation that was not tried: another transaction has locked its session's row."""


DEFERRED = Deferred()

_known = select(sessions.c.session_id).where(sessions.c.session_id == any_(bindparam("sids", type_=ARRAY(String))))
_lock_heads = _known.order_by(sessions.c.session_id).with_for_update(skip_locked=True)

# On SQLite: a claim takes its head, and a commit advances it, exactly if the log ends where the process knows it to
# end. So the number of the next event is known, and a row count of 0 is the only other answer. The conditions stand
# three times: here, for PostgreSQL below, and for what does not fit in `statements` (`claim_heads`, `free_open_turns`).

_TAKE = """
UPDATE sessions SET version = version + 1, open_turns = open_turns + 1, last_turn = last_turn + 1
WHERE session_id = ?1 AND version = ?2 AND turns = ?3 AND open_turns < ?4 AND last_turn = ?5 AND status = 'open'
    AND EXISTS (SELECT 1 FROM events WHERE session_id = ?1 AND seq = ?2 AND at = ?6)
"""
_ADVANCE = """
UPDATE sessions SET version = version + ?7, open_turns = open_turns - 1, turns = turns + 1, updated_at = ?8,
    weight_version = CASE WHEN weight_version IS NULL OR weight_version < ?9 THEN ?9 ELSE weight_version END,
    engine = ?10
WHERE session_id = ?1 AND version = ?2 AND turns = ?3
    AND EXISTS (SELECT 1 FROM open_turns WHERE session_id = ?1 AND fence = ?4 AND incarnation = ?5 AND opened_at = ?6)
"""
_OPEN = """
INSERT INTO open_turns
    (session_id, fence, turn, parent_turn, incarnation, body_hash, retry_key, adapter, opened_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_FREE = "DELETE FROM open_turns WHERE session_id = ? AND fence = ?"
_CONTENT = """
INSERT INTO turns (session_id, turn, parent_turn, segment, choice_index, protocol, tokens, exchange)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
_EVENT = """
INSERT INTO events (session_id, seq, type, version, at, data, tx, position) VALUES (?, ?, ?, ?, ?, ?, 0, ?)
"""

# On PostgreSQL: one statement for all claims, one for all commits. `held` locks the heads that fit, or leaves out those
# that another transaction has locked. It sees their newest rows; all else it sees as it was when the statement began.
# That is enough, because whoever changes a session raises its version. A log that a transaction wrote to which began
# earlier, with other sessions, goes on behind that: none of its events is passed by a reader (`schema`).

_TAKE_ALL = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::bigint[], $3::float8[], $4::int[], $5::int[], $6::int[], $7::int[],
        $8::bigint[], $9::text[], $10::text[], $11::text[], $12::float8[], $13::smallint[], $14::bytea[])
    AS t(sid, known, known_at, known_turns, most, turn, parent, incarnation, body_hash, retry_key, adapter, at, version,
        data)
), held AS (
    SELECT g.*, e.tx FROM given g
    JOIN sessions s ON s.session_id = g.sid
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
        (session_id, fence, turn, parent_turn, incarnation, body_hash, retry_key, adapter, opened_at)
    SELECT sid, known + 1, turn, parent, incarnation, body_hash, retry_key, adapter, at FROM taken
), logged AS (
    INSERT INTO events (session_id, seq, type, version, at, data, tx)
    SELECT sid, known + 1, 'TurnOpened', version, at, data, GREATEST(pg_current_xact_id()::text::bigint, tx) FROM taken
)
SELECT sid FROM taken
"""
_ADVANCE_ALL = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::bigint[], $3::int[], $4::bigint[], $5::bigint[], $6::float8[], $7::int[],
        $8::float8[], $9::bigint[], $10::text[], $11::int[], $12::int[], $13::int[], $14::smallint[], $15::text[],
        $16::bytea[], $17::bytea[])
    AS t(sid, known, known_turns, fence, incarnation, opened_at, count, at, weight, engine, turn, parent, segment,
        choice_index, protocol, tokens, exchange)
), new_events AS (
    SELECT * FROM unnest($18::text[], $19::bigint[], $20::text[], $21::smallint[], $22::float8[], $23::bytea[])
    AS t(sid, seq, type, version, at, data)
), held AS (
    SELECT g.*, e.tx FROM given g
    JOIN sessions s ON s.session_id = g.sid
    JOIN events e ON e.session_id = g.sid AND e.seq = g.known
    WHERE s.version = g.known AND s.turns = g.known_turns
        -- No join: a plan that was made while few turns were open would read all that are open.
        AND g.opened_at = (SELECT opened_at FROM open_turns o
            WHERE o.session_id = g.sid AND o.fence = g.fence AND o.incarnation = g.incarnation)
    FOR UPDATE OF s SKIP LOCKED
), advanced AS (
    UPDATE sessions s SET version = s.version + h.count, open_turns = s.open_turns - 1, turns = s.turns + 1,
        updated_at = h.at, weight_version = GREATEST(s.weight_version, h.weight), engine = h.engine
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


def apply_all(tx: Tx, operations: Sequence[Operation[Any]]) -> list[Any]:
    """The outcomes in the same order. An operation without a session runs alone."""
    claims: list[Claim] = []
    commits: list[Commit] = []
    for operation in operations:
        if type(operation) is Claim:
            claims.append(operation)
        elif type(operation) is Commit:
            commits.append(operation)
    if not claims and not commits:
        return _apply_each(tx, operations)
    if len(operations) > 1:
        counts = Counter([operation.session_id for operation in operations])
        if len(counts) < len(operations):
            claims = [claim for claim in claims if counts[claim.session_id] == 1]
            commits = [commit for commit in commits if counts[commit.session_id] == 1]
    if isinstance(tx, SqliteTx):
        written = _write_here(tx, claims, commits)
    else:
        assert isinstance(tx, PostgresTx)
        written = _write_remotely(tx, claims, commits)
    if len(written) < len(operations):
        others = [operation for operation in operations if operation.session_id not in written]
        remaining = iter(_apply_each(tx, others))
        return [written.get(operation.session_id) or next(remaining) for operation in operations]
    return [written[operation.session_id] for operation in operations]


def _write_here(tx: SqliteTx, claims: Sequence[Claim], commits: Sequence[Commit]) -> dict[str, Appended]:
    """Write those that fit to SQLite; the outcomes by session."""
    execute, many, positions = tx.cursor.execute, tx.cursor.executemany, tx.positions
    written: dict[str, Appended] = {}
    log: list[tuple[Any, ...]] = []
    opened: list[tuple[Any, ...]] = []
    for claim in claims:
        known, event, session_id, at = claim.known, claim.event, claim.session_id, claim.at
        if claim.most > 1 and (claim.is_retry or event.retry_key is not None):
            continue  # It may repeat a turn that another process has open.
        fence = known.version + 1
        fits = (session_id, known.version, known.turns, claim.most, event.turn - 1, known.last_event_at)
        if execute(_TAKE, fits).rowcount == 1:
            opened.append(
                (
                    session_id,
                    fence,
                    event.turn,
                    event.parent,
                    event.incarnation,
                    event.body_hash,
                    event.retry_key,
                    event.adapter,
                    at,
                )
            )
            log.append((session_id, fence, "TurnOpened", event.VERSION, at, encode(event), next(positions)))
            written[session_id] = Appended((Recorded(fence, at, event),))
    content: list[tuple[Any, ...]] = []
    ended: list[Commit] = []
    for commit in commits:
        turn = _plain_turn(commit)
        if turn is None:
            continue
        known, session_id, at = commit.known, commit.session_id, commit.at
        held = (session_id, known.version, known.turns, commit.fence, commit.incarnation, commit.opened_at)
        weight = max(turn.version_numbers, default=None)
        if execute(_ADVANCE, (*held, len(commit.events), at, weight, turn.engine)).rowcount == 1:
            ended.append(commit)
            content.append((session_id, *_content(commit, turn)))
            recorded = []
            for seq, new in enumerate(commit.events, known.version + 1):
                log.append((session_id, seq, type(new).__name__, new.VERSION, at, encode(new), next(positions)))
                recorded.append(Recorded(seq, at, new))
            written[session_id] = Appended(tuple(recorded))
    if opened:
        many(_OPEN, opened)
    if ended:
        many(_FREE, [(commit.session_id, commit.fence) for commit in ended])
        many(_CONTENT, content)
    if log:
        many(_EVENT, log)
    _write_rest(tx, opened, ended)
    return written


def _write_remotely(tx: PostgresTx, claims: Sequence[Claim], commits: Sequence[Commit]) -> dict[str, Appended]:
    """Write those that fit, and that nobody else has locked, to PostgreSQL; the outcomes by session."""
    written: dict[str, Appended] = {}
    taken = [
        (
            claim.session_id,
            claim.known.version,
            claim.known.last_event_at,
            claim.known.turns,
            claim.most,
            claim.event.turn,
            claim.event.parent,
            claim.event.incarnation,
            claim.event.body_hash,
            claim.event.retry_key,
            claim.event.adapter,
            claim.at,
            claim.event.VERSION,
            encode(claim.event),
        )
        for claim in claims
        if claim.most == 1 or not (claim.is_retry or claim.event.retry_key is not None)
    ]
    opened = {row[0] for row in tx.rows(_TAKE_ALL, zip(*taken, strict=True))} if taken else set()
    for claim in claims:
        if claim.session_id in opened:
            fence = claim.known.version + 1
            written[claim.session_id] = Appended((Recorded(fence, claim.at, claim.event),))
    for row in taken:
        if row[0] in opened:
            tx.last_event = LastEvent(row[0], row[1] + 1, row[-1], row[-3])
    heads: list[tuple[Any, ...]] = []
    log: list[tuple[Any, ...]] = []
    for commit in commits:
        turn = _plain_turn(commit)
        if turn is None:
            continue
        known = commit.known
        heads.append(
            (
                commit.session_id,
                known.version,
                known.turns,
                commit.fence,
                commit.incarnation,
                commit.opened_at,
                len(commit.events),
                commit.at,
                max(turn.version_numbers, default=None),
                turn.engine,
                *_content(commit, turn),
            )
        )
        for seq, new in enumerate(commit.events, known.version + 1):
            log.append((commit.session_id, seq, type(new).__name__, new.VERSION, commit.at, encode(new)))
    if heads:
        columns = (*zip(*heads, strict=True), *zip(*log, strict=True))
        advanced = {row[0] for row in tx.rows(_ADVANCE_ALL, columns)}
        ended = [commit for commit in commits if commit.session_id in advanced]
        for commit in ended:
            events = enumerate(commit.events, commit.known.version + 1)
            written[commit.session_id] = Appended(tuple(Recorded(seq, commit.at, new) for seq, new in events))
        for session_id, seq, _, _, at, data in log:
            if session_id in advanced:
                tx.last_event = LastEvent(session_id, seq, data, at)
        _write_rest(tx, opened, ended)
    else:
        _write_rest(tx, opened, ())
    return written


def _content(commit: Commit, turn: TurnCommitted) -> tuple[Any, ...]:
    """The row of the turn's content, in the order of both databases' statements, without its session."""
    parts = commit.tokens, commit.exchange
    return turn.turn, turn.parent, turn.segment, turn.choice_index, turn.protocol, *parts


def _plain_turn(commit: Commit) -> TurnCommitted | None:
    """The commit's turn, if it needs neither a look at what checkpoints keep, nor one for its staged chunks."""
    turn = None
    for event in commit.events:
        if type(event) is TurnCommitted:
            turn = event
        elif type(event) is BlobsTombstoned:
            return None
    assert turn is not None
    return None if turn.payloads and commit.staged else turn


def _write_rest(tx: Tx, opened: Sequence[Any] | set[str], ended: Sequence[Commit]) -> None:
    """What only some commits have; the last statements of claims and commits."""
    if opened and crash_points.ARMED:
        crash_points.reach("in_claim")
    for commit in ended:
        if commit.blobs:
            tx.insert(sql.insert_blob, [blob_row(commit.session_id, blob) for blob in commit.blobs])
        if commit.chunks:
            tx.insert(sql.insert_chunk, [chunk_row(commit.session_id, commit.fence, chunk) for chunk in commit.chunks])
    staged = [
        {"sid": commit.session_id, "fenced": commit.fence if commit.stages == "turn" else None}
        for commit in ended
        if commit.stages
    ]
    if staged:
        tx.each(staged_tokens.drop_committed, staged)
    if ended and crash_points.ARMED:
        crash_points.reach("in_commit")


def _apply_each(tx: Tx, operations: Sequence[Operation[Any]]) -> list[Any]:
    """Each operation decides for itself what becomes of it."""
    if len(operations) == 1 and not tx.is_remote:
        return [operations[0].apply(tx)]
    deferred = _lock(tx, operations) if tx.is_remote and operations[0].session_id else set()
    outcomes: dict[int, Any] = {
        place: DEFERRED for place, operation in enumerate(operations) if operation.session_id in deferred
    }
    counts = Counter(operation.session_id for operation in operations)
    sets: dict[type[SetOperation], list[int]] = {}
    for place, operation in enumerate(operations):
        is_single = counts[operation.session_id] == 1 and place not in outcomes
        if is_single and isinstance(operation, SetOperation) and operation.is_of_set:
            sets.setdefault(type(operation), []).append(place)
    for kind, places in sets.items():
        outcomes |= zip(places, kind.apply_set(tx, [operations[place] for place in places]), strict=True)
    for place, operation in enumerate(operations):
        if place not in outcomes:
            outcomes[place] = operation.apply(tx)
    return [outcomes[place] for place in range(len(operations))]


def _lock(tx: Tx, operations: Sequence[Operation[Any]]) -> set[str]:
    """Lock the heads of the operations' sessions; returns those that another transaction has locked."""
    ids = sorted({operation.session_id for operation in operations})
    locked = {row[0] for row in tx.all(_lock_heads, {"sids": ids})}
    tx.add_locked(locked)
    missing = [session_id for session_id in ids if session_id not in locked]
    return {row[0] for row in tx.all(_known, {"sids": missing})} if missing else set()
