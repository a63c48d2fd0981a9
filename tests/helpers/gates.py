"""Turns as gates see them."""

from __future__ import annotations

from typing import Any

from app.domain.events import DEFAULT_RUN
from app.features.gates.gates import GATES, Passage


class Passing:
    """A turn at the gates."""

    def __init__(self, adapter: str, run: str = DEFAULT_RUN, *, has_claim: bool = False) -> None:
        self.features: dict[str, Any] = {GATES: Passage(0)}
        self.run = run
        self.adapter = adapter
        self.has_claim = has_claim

    @property
    def ticket(self) -> int:
        passage: Passage = self.features[GATES]
        return passage.ticket
