"""What a release may say otherwise of the store of an earlier one, and why. Nothing else may change."""

from __future__ import annotations

from typing import Any

from compat.compare import Allowed, added

EXPORT = r"GET /export(\?.*)?"


def is_stripped(before: Any, after: Any) -> bool:
    """Components are there no more, and the event says so."""
    return after == "(missing)" or (before == "(missing)" and after is True)


ALLOWED = (
    Allowed("a lease begins when the group is asked for", r"GET /export/groups\?.*", r".*/lease_until"),
    Allowed(
        "GET /sessions/{id} gives back what the session was given at its creation",
        r"GET /sessions/[^/?]+",
        r"0/session",
        added,
    ),
    Allowed(
        "an erasure takes the components of rewards, those of earlier releases too",
        r"GET /sessions/(erased|acked-1)/events",
        r"\d+/(components|components_erased)",
        is_stripped,
    ),
)
