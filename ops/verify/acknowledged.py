"""Checks acknowledged turns: each is in the log once, and its stored reply equals the client's, byte for byte."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations

from app.domain.events import ReplayKind, TurnCommitted, UnknownEvent
from app.domain.session import Session
from app.errors import SessionUnreadable
from app.sessions.transcript import stored_reply
from app.store import repair
from app.store.database import Database
from app.store.dialect import CoreReads
from app.store.repair import FoldedLog
from ops.verify.report import Acknowledged, Report


async def check(
    database: Database, acknowledged: Iterable[Acknowledged], report: Report, progress: Callable[[str], None]
) -> int:
    """Look up the acknowledged turns, and report each one that is missing or different.

    Returns the number of idempotency keys in their sessions under which more than one turn was committed.
    """
    turns_of: dict[str, list[Acknowledged]] = {}
    for turn in acknowledged:
        turns_of.setdefault(turn.session_id, []).append(turn)
    doubled = 0
    for session_id, acknowledged_turns in turns_of.items():
        doubled += await _check_session(database, session_id, acknowledged_turns, report)
        progress(f"acknowledged turns, at {session_id}")
    return doubled


async def _check_session(
    database: Database, session_id: str, acknowledged_turns: Sequence[Acknowledged], report: Report
) -> int:
    try:
        log = await database.read(
            lambda connection: repair.read_log(CoreReads(connection), session_id), session_id=session_id
        )
    except (UnknownEvent, SessionUnreadable):
        log = None  # the check of the session has already reported the reason
    for turn in sorted(acknowledged_turns, key=lambda turn: turn.turn):
        difference = await _difference(database, log, turn, report)
        if difference is not None:
            report.missing.append(turn)
            report.found(session_id, f"turn {turn.turn} was acknowledged, {difference}")
    turns = () if log is None else log.session.turns
    keys = Counter(turn.retry_key for turn in turns if turn.retry_key)
    doubled = [key for key, count in keys.items() if count > 1]
    for key in doubled:
        report.found(session_id, f"{keys[key]} turns were committed under the key {key}")
    return len(doubled)


async def _difference(database: Database, log: FoldedLog | None, turn: Acknowledged, report: Report) -> str | None:
    session = None if log is None else log.session.with_undone
    if log is None or session is None:
        return "but is not in the log"
    if turn.turn == 0:
        return None if turn.retry_key in (kept.retry_key for kept in session.turns) else "but is not in the log"
    if turn.turn not in session.turns:
        return "but is not in the log"
    if turn.retry_key not in (None, _committed(log, session, turn.turn).retry_key):
        return "but with another key"
    if turn.reply_sha256 is None:
        return None
    if session.status == "erased":
        report.not_compared += 1
        return None
    try:
        for kinds in _kind_combinations([payload.kind for payload in session.whole_payloads(turn.turn)]):
            _, _, body = await stored_reply(database, session, turn.turn, kinds)
            if hashlib.sha256(body).hexdigest() == turn.reply_sha256:
                return None
    except SessionUnreadable as error:
        return f"but cannot be read: {error}"
    if _tombstoned(log, session, turn.turn):
        report.not_compared += 1
        return None
    return "with another reply"


def _kind_combinations(kinds: Sequence[ReplayKind]) -> Iterator[tuple[ReplayKind, ...]]:
    """The payload kinds that the client may have requested, all combinations: all of them first, then fewer, then
    none."""
    for count in range(len(kinds), -1, -1):
        yield from combinations(kinds, count)


def _tombstoned(log: FoldedLog, session: Session, number: int) -> bool:
    """Whether the reply had a payload that has been tombstoned since."""
    return len(_committed(log, session, number).payloads) > len(session.whole_payloads(number))


def _committed(log: FoldedLog, session: Session, number: int) -> TurnCommitted:
    event = log.events[session.turn(number).seq - 1].event
    assert isinstance(event, TurnCommitted)
    return event
