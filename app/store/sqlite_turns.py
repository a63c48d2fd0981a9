"""Claims and commits on SQLite: each takes or advances its head by one conditional update, and the rows of all that fit
follow, one `executemany` a table.

A turn takes about seven statements. They are text with values in the order of the columns: Core's cost for each would
be most of the writer's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.domain.events import Recorded, encode
from app.store.dialect import SqliteTx
from app.store.log import Appended

if TYPE_CHECKING:
    from app.store.log_turns import Claim, Commit

# A claim takes its head, and a commit advances it, exactly if the log ends where the process knows it to end. So the
# number of the next event is known, and a row count of 0 is the only other answer. What else is compared follows from
# that in a sound store.

TAKE = """
UPDATE sessions SET version = version + 1, open_turns = open_turns + 1, last_turn = last_turn + 1
WHERE session_id = ?1 AND version = ?2 AND turns = ?3 AND open_turns < ?4 AND last_turn = ?5 AND status = 'open'
    -- The time of the last event (`last_event_at`) tells logs of one length apart: a crash of the machine may undo
    -- claims, which are not synced, and other events then take their places.
    AND EXISTS (SELECT 1 FROM events WHERE session_id = ?1 AND seq = ?2 AND at = ?6)
"""
ADVANCE = """
UPDATE sessions SET version = version + ?7, open_turns = open_turns - 1, turns = turns + 1, updated_at = ?8,
    weight_version = CASE WHEN weight_version IS NULL OR weight_version < ?9 THEN ?9 ELSE weight_version END,
    engine = ?10
WHERE session_id = ?1 AND version = ?2 AND turns = ?3
    -- `opened_at` tells claims under one fence apart: the fence of one that a crash has undone is given again.
    AND EXISTS (SELECT 1 FROM open_turns WHERE session_id = ?1 AND fence = ?4 AND incarnation = ?5 AND opened_at = ?6)
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


def write(tx: SqliteTx, claims: Sequence[Claim], commits: Sequence[Commit]) -> dict[str, Appended]:
    """Write those that fit, each of another session; the outcomes by session."""
    execute, many, positions = tx.cursor.execute, tx.cursor.executemany, tx.positions
    written: dict[str, Appended] = {}
    log: list[tuple[Any, ...]] = []
    opened: list[tuple[Any, ...]] = []
    for claim in claims:
        known, event, session_id, at = claim.known, claim.event, claim.session_id, claim.at
        fence = known.version + 1
        fits = (session_id, known.version, known.turns, claim.most, event.turn - 1, known.last_event_at)
        if execute(TAKE, fits).rowcount == 1:
            asked = event.turn, event.parent, event.incarnation, event.body_hash, event.retry_key, event.adapter
            opened.append((session_id, fence, *asked, at, event.reserved))
            log.append((session_id, fence, "TurnOpened", event.VERSION, at, encode(event), next(positions)))
            written[session_id] = Appended((Recorded(fence, at, event),))
    content: list[tuple[Any, ...]] = []
    ended: list[tuple[str, int]] = []
    for commit in commits:
        known, session_id, at, turn = commit.known, commit.session_id, commit.at, commit.turn
        held = (session_id, known.version, known.turns, commit.fence, commit.incarnation, commit.opened_at)
        weight = max(turn.version_numbers, default=None)
        if execute(ADVANCE, (*held, len(commit.events), at, weight, turn.engine)).rowcount == 1:
            ended.append((session_id, commit.fence))
            place = turn.turn, turn.parent, turn.segment, turn.choice_index, turn.protocol
            content.append((session_id, *place, commit.tokens, commit.exchange))
            recorded = []
            for seq, new in enumerate(commit.events, known.version + 1):
                log.append((session_id, seq, type(new).__name__, new.VERSION, at, encode(new), next(positions)))
                recorded.append(Recorded(seq, at, new))
            written[session_id] = Appended(tuple(recorded))
    if opened:
        many(OPEN, opened)
    if ended:
        many(FREE, ended)
        many(CONTENT, content)
    if log:
        many(EVENT, log)
    return written
