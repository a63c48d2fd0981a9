"""Which replay payloads are kept, and which chunks go with those that are not.

A payload of T tokens has T - 1 rows and a turn's rows begin with those of the turn before, so the newest
turn's payload holds them all. Older ones are kept only as far back as a retry may go.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Literal

from app.domain.events import BlobsTombstoned
from app.domain.session import Payload, Session


def tombstones(session: Session) -> BlobsTombstoned | None:
    """What falls out of the window in this state, if anything.

    Kept are the newest `rollback_window` + 1 live turns of every segment, or with `retain: all` every turn.
    """
    if session.config.retain == "all":
        return None
    return _event(session, [turn for turn in session.payloads if not _in_window(session, turn)], "window")


def _in_window(session: Session, turn: int) -> bool:
    """The live path ascends in turns and in segments, so the turn's segment ends where the next begins."""
    path = session.path
    at = bisect.bisect_left(path, turn)
    if at == len(path) or path[at] != turn:
        return False
    behind = at + session.config.rollback_window + 1
    return behind >= len(path) or session.turn(path[behind]).segment != session.turn(turn).segment


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
