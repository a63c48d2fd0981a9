"""What holds of a log in which a restore took events back; nothing is removed from it."""

from __future__ import annotations

from collections.abc import Iterable

from app.domain.events import Recorded, SessionRestored


def in_effect(log: Iterable[Recorded]) -> list[Recorded]:
    """The events of a log that its state follows from: without those that a restore took back.

    A restore may go back to before an earlier one, so its predecessor is the event to which it went back. Events may
    be left out of `log`.
    """
    places: list[tuple[Recorded, int]] = []
    seqs: list[int] = []
    for recorded in log:
        before = len(places) - 1
        if isinstance(recorded.event, SessionRestored):
            while before >= 0 and seqs[before] > recorded.event.to_seq:
                before -= 1
        places.append((recorded, before))
        seqs.append(recorded.seq)
    kept: list[Recorded] = []
    at = len(places) - 1
    while at >= 0:
        recorded, at = places[at]
        kept.append(recorded)
    kept.reverse()
    return kept
