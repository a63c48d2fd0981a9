"""Numbers of things, in words."""

from __future__ import annotations


def amount(number: int, noun: str, plural: str | None = None) -> str:
    """`1 problem`, `2 problems`; `plural` where that is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
