"""Which replay payloads are kept, and which chunks are freed with the others.

A payload of T tokens has T - 1 rows, and a turn's rows begin with the previous turn's, so the newest payload holds them
all. Older ones are kept only as far back as a retry may go.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Literal

import msgspec

from app.domain.events import BlobsTombstoned
from app.domain.session import Payload, Session


def tombstones(session: Session) -> BlobsTombstoned | None:
    """The payloads that leave the window in this state, if any.

    For each segment and kind, the newest `rollback_window` + 1 live turns with a payload are kept; with `retain: all`
    every turn.
    """
    return _event(session, _behind_window(session), "window")


def tombstones_of_fork(session: Session, lost: Collection[int]) -> BlobsTombstoned | None:
    """As `tombstones`, of copied turns; `lost` are those whose payloads can no longer be read at the source."""
    readable = {turn: payloads for turn, payloads in session.payloads.items() if turn not in lost}
    behind = _behind_window(msgspec.structs.replace(session, payloads=readable))
    return _event(session, [*lost, *behind], "window")


def _behind_window(session: Session) -> list[int]:
    if session.config.retain == "all":
        return []
    newer: Counter[tuple[int, str]] = Counter()
    dropped: list[int] = []
    for turn in sorted(session.payloads, reverse=True):
        places = [(session.turn(turn).segment, payload.kind) for payload in session.payloads[turn]]
        if not _is_live(session, turn) or all(newer[place] > session.config.rollback_window for place in places):
            dropped.append(turn)
        else:
            newer.update(places)
    return dropped


def _is_live(session: Session, turn: int) -> bool:
    at = bisect.bisect_left(session.path, turn)
    return at < len(session.path) and session.path[at] == turn


def tombstone_all(session: Session) -> BlobsTombstoned | None:
    """All remaining payloads, when a session has been closed for long enough."""
    return _event(session, list(session.payloads), "closed")


def _event(session: Session, turns: list[int], reason: Literal["window", "closed"]) -> BlobsTombstoned | None:
    if not turns:
        return None
    dropped = set(turns)
    kept_keys = _keys(payload for turn, live in session.payloads.items() if turn not in dropped for payload in live)
    dropped_keys = _keys(payload for turn in turns for payload in session.payloads[turn])
    return BlobsTombstoned(tuple(sorted(turns)), tuple(sorted(dropped_keys - kept_keys)), reason)


def _keys(payloads: Iterable[Payload]) -> set[tuple[int, int]]:
    return {(chunk.fence, chunk.number) for payload in payloads for chunk in payload.chunks}
