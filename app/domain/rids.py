"""The ids of generations and sessions at the engines."""

from __future__ import annotations

import hashlib

RID_MARK = "turnlog-"

RID_CHARACTERS = 32
"""Length after the mark. All rids have one length, so that none is a prefix of another: engines abort by prefix."""


def rid_of(session_id: str, fence: int, incarnation: int) -> str:
    """A generation's id at the engine. A claim is not synced: one that is lost with the power leaves its fence to
    another process's turn, which must not be taken for it."""
    name = f"{session_id}\0{fence}\0{incarnation}"
    return RID_MARK + hashlib.sha256(name.encode()).hexdigest()[:RID_CHARACTERS]


def engine_session_of(session_id: str) -> str:
    """A session's id at the engine. It holds a character that no id chosen by a client may have."""
    return "turnlog~" + hashlib.sha256(session_id.encode()).hexdigest()[:RID_CHARACTERS]
