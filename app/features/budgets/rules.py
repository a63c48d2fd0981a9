"""What a turn may use of the limits that hold for it: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from app.domain.events import LimitName, Limits
from app.domain.patterns import MAX_INTEGER


class Used(msgspec.Struct, frozen=True):
    """What sessions have used: turns and sampled tokens that are committed, turns in flight, and the tokens that these
    have reserved."""

    turns: int = 0
    tokens: int = 0
    open_turns: int = 0
    reserved: int = 0


class NoneLeft(msgspec.Struct, frozen=True):
    """Nothing of `limit` is left, or, if `is_reserved`, nothing that no turn in flight has reserved."""

    limit: LimitName
    is_reserved: bool


def allowance(budgets: Iterable[tuple[Limits, Used]], wanted: int | None) -> int | NoneLeft:
    """How many tokens a turn reserves that wants at most `wanted` (None: any number); 0 if no limit is on tokens."""
    reserved: NoneLeft | None = None
    free: int | None = None
    for limits, used in budgets:
        for name, most, spent, held in (
            ("turns", limits.turns, used.turns, used.open_turns),
            ("tokens", limits.tokens, used.tokens, used.reserved),
        ):
            if most is None:
                continue
            if spent >= most:
                return NoneLeft(name, is_reserved=False)  # type: ignore[arg-type]
            if spent + held >= most:
                reserved = reserved or NoneLeft(name, is_reserved=True)  # type: ignore[arg-type]
            elif name == "tokens":
                left = most - spent - held
                free = left if free is None else min(free, left)
    if reserved is not None:
        return reserved
    return 0 if free is None else free if wanted is None else min(wanted, free)


def left(limits: Limits, used: Used, seconds: float) -> dict[str, Any]:
    """What is left of each limit but that on the context, `seconds` after the creation; what is reserved is not."""
    counts = (
        ("turns", limits.turns, used.turns + used.open_turns),
        ("tokens", limits.tokens, used.tokens + used.reserved),
        ("seconds", limits.seconds, seconds),
    )
    return {name: max(most - spent, 0) for name, most, spent in counts if most is not None}


NAMES = ("max_tokens", "max_completion_tokens")
"""The parameters that limit a generation; which of two an engine takes is its own choice."""


def wanted_tokens(values: Sequence[Any]) -> int | None:
    """The most that a request may generate by its values of `NAMES`, None where it does not say. Raises ValueError for
    a value that an engine might take for a larger number."""
    given = [value for value in values if value is not None]
    for value in given:
        if type(value) is not int or not 1 <= value <= MAX_INTEGER:
            raise ValueError
    return max(given, default=None)
