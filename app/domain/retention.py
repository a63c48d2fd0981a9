"""Which replay payloads are kept, and which chunks go with those that are not.

A payload of T tokens has T - 1 rows and a turn's rows begin with those of the turn before, so the newest
turn's payload holds them all. Older ones are kept only as far back as a retry may go.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from app.domain.events import BlobsTombstoned
from app.domain.session import Payload, Session


def tombstones(session: Session) -> BlobsTombstoned | None:
    """What falls out of the window in this state, if anything.

    Kept are, of each segment and kind, the newest `rollback_window` + 1 live turns that have a payload, or with
    `retain: all` every turn.
    """
    if session.config.retain == "all":
        return None
    newer: Counter[tuple[int, str]] = Counter()
    gone: list[int] = []
    for turn in sorted(session.payloads, reverse=True):
        homes = [(session.turn(turn).segment, payload.kind) for payload in session.payloads[turn]]
        if not _is_live(session, turn) or all(newer[home] > session.config.rollback_window for home in homes):
            gone.append(turn)
        else:
            newer.update(homes)
    return _event(session, gone, "window")


def _is_live(session: Session, turn: int) -> bool:
    at = bisect.bisect_left(session.path, turn)
    return at < len(session.path) and session.path[at] == turn


def tombstone_all(session: Session) -> BlobsTombstoned | None:
    """All that is left, once a session has been closed for long enough."""
    return _event(session, list(session.payloads), "closed")


def _event(session: Session, turns: list[int], reason: Literal["window", "closed"]) -> BlobsTombstoned | None:
    if not turns:
        return None
    gone = set(turns)
    stays = _keys(payload for turn, live in session.payloads.items() if turn not in gone for payload in live)
    goes = _keys(payload for turn in turns for payload in session.payloads[turn])
    return BlobsTombstoned(tuple(sorted(turns)), tuple(sorted(goes - stays)), reason)


def _keys(payloads: Iterable[Payload]) -> set[tuple[int, int]]:
    return {(chunk.fence, chunk.number) for payload in payloads for chunk in payload.chunks}
