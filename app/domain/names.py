"""Names that clients give sessions: each is a run's, so that two runs may use the same ones."""

from __future__ import annotations

import hashlib

from app.domain.events import DEFAULT_RUN


def first_id(run: str, name: str) -> str:
    """The id of a name's first session where a header names it: the name itself in the default run; in any other 32 hex
    digits, which every process makes alike."""
    return name if run == DEFAULT_RUN else hashlib.sha256(f"{run} {name}".encode()).hexdigest()[:32]
