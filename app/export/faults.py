"""Faults that are one session's business: they leave out its rows, and no others."""

from __future__ import annotations

import traceback

from app.domain.events import UnknownEvent
from app.domain.samples import Inconsistent
from app.errors import SessionUnreadable
from app.export.containers.writer import EXCLUDED
from app.export.row import Fields
from app.export.shapes import shared
from workers.codec import CorruptContent

KNOWN = (UnknownEvent, CorruptContent, Inconsistent, SessionUnreadable)
"""What a damaged session raises; the text has no content."""


def told(error: Exception) -> str:
    """A session's fault, without content: of one that nobody has thought of, its type and where it was raised.

    Raises MemoryError: that is the process's.
    """
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, KNOWN):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.name}"


def excluded(
    session_id: object,
    cursor: object,
    reason: str,
    *,
    segment: object = None,
    turn: int | None = None,
    lost_tokens: int | None = None,
) -> Fields:
    """A row that says why something is not in an export; `lost_tokens`: so many sampled tokens, None if nobody knows
    how many."""
    said = {"session_id": session_id, "segment": segment, "turn": turn, EXCLUDED: reason}
    return {**said, "lost_tokens": lost_tokens, "cursor": cursor}


def instead(shaped: Fields, error: Exception) -> Fields:
    """What stands in the place of a shaped row that cannot be written."""
    own = shared.identity_of(shaped)
    return excluded(own["session_id"], own["cursor"], f"unreadable: {told(error)}", segment=own["segment"])
