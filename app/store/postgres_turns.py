"""Claims and commits on PostgreSQL: one statement for all claims of a batch, and one for all its commits.

`held` locks the heads that fit, or leaves out those that another transaction has locked. It sees their newest rows; all
else it sees as it was when the statement began. That is enough, because whoever changes a session raises its version.
A log that a transaction wrote to which began earlier, with other sessions, goes on behind that: none of its events is
passed by a reader (`schema`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.domain.events import Recorded, encode
from app.store.log import Appended
from app.store.postgres import LastEvent, PostgresTx

if TYPE_CHECKING:
    from app.store.log_turns import Claim, Commit

TAKE = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::bigint[], $3::float8[], $4::int[], $5::int[], $6::int[], $7::int[],
        $8::bigint[], $9::text[], $10::text[], $11::text[], $12::float8[], $13::bigint[], $14::smallint[], $15::bytea[])
    AS t(sid, known, known_at, known_turns, most, turn, parent, incarnation, body_hash, retry_key, adapter, at,
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
        -- It tells claims under one fence apart: the fence of one that a crash has undone is given again.
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


def write(tx: PostgresTx, claims: Sequence[Claim], commits: Sequence[Commit]) -> dict[str, Appended]:
    """Write those that fit, and that nobody else has locked, each of another session; the outcomes by session."""
    written: dict[str, Appended] = {}
    if claims:
        _take(tx, claims, written)
    if commits:
        _advance(tx, commits, written)
    return written


def _take(tx: PostgresTx, claims: Sequence[Claim], written: dict[str, Appended]) -> None:
    given: list[tuple[Any, ...]] = []
    for claim in claims:
        known, event = claim.known, claim.event
        fits = known.version, known.last_event_at, known.turns, claim.most
        asked = event.turn, event.parent, event.incarnation, event.body_hash, event.retry_key, event.adapter
        given.append((claim.session_id, *fits, *asked, claim.at, event.reserved, event.VERSION, encode(event)))
    taken = {row[0] for row in tx.rows(TAKE, zip(*given, strict=True))}
    for claim, row in zip(claims, given, strict=True):
        if claim.session_id in taken:
            fence = claim.known.version + 1
            written[claim.session_id] = Appended((Recorded(fence, claim.at, claim.event),))
            tx.last_event = LastEvent(claim.session_id, fence, row[-1], claim.at)


def _advance(tx: PostgresTx, commits: Sequence[Commit], written: dict[str, Appended]) -> None:
    heads: list[tuple[Any, ...]] = []
    log: list[tuple[Any, ...]] = []
    for commit in commits:
        known, turn = commit.known, commit.turn
        held = known.version, known.turns, commit.fence, commit.incarnation, commit.opened_at
        weight = max(turn.version_numbers, default=None)
        place = turn.turn, turn.parent, turn.segment, turn.choice_index, turn.protocol
        new_head = len(commit.events), commit.at, weight, turn.engine
        heads.append((commit.session_id, *held, *new_head, *place, commit.tokens, commit.exchange))
        for seq, new in enumerate(commit.events, known.version + 1):
            log.append((commit.session_id, seq, type(new).__name__, new.VERSION, commit.at, encode(new)))
    advanced = {row[0] for row in tx.rows(ADVANCE, (*zip(*heads, strict=True), *zip(*log, strict=True)))}
    for commit in commits:
        if commit.session_id in advanced:
            events = enumerate(commit.events, commit.known.version + 1)
            written[commit.session_id] = Appended(tuple(Recorded(seq, commit.at, new) for seq, new in events))
    for session_id, seq, _, _, at, data in log:
        if session_id in advanced:
            tx.last_event = LastEvent(session_id, seq, data, at)
