"""The ids by which engines know our generations."""

from __future__ import annotations

import hashlib

RID_MARK = "turnlog-"

RID_CHARACTERS = 32
"""Behind the mark; all rids have one length, so that none is another's prefix, by which engines abort."""


def rid_of(session_id: str, fence: int) -> str:
    """A generation's id at the engine."""
    return RID_MARK + hashlib.sha256(f"{session_id}\0{fence}".encode()).hexdigest()[:RID_CHARACTERS]
