"""Turns as gates see them."""

from __future__ import annotations

from app.features.gates.gates import Closings


class Passing:
    """A turn at the gates."""

    ticket = 0
    closings: Closings = (0, 0)

    def __init__(self, adapter: str, *, has_claim: bool = False) -> None:
        self.adapter = adapter
        self.has_claim = has_claim
