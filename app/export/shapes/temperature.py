"""At which temperature a turn was sampled, for trainers that scale logits by it."""

from __future__ import annotations

import msgspec

from app.export.row import Row, Unfit
from workers.codec import describe

DEFAULT = 1.0
"""OpenAI's default, for a request that names none; an engine may be configured to another."""


class _Params(msgspec.Struct, frozen=True):
    temperature: float | None = None


describe(_Params)


def temperatures(row: Row) -> list[float]:
    """One for each turn of the row's sample. Raises Unfit for one that is no number."""
    return [_temperature(turn.event.turn, turn.params) for turn in row.turns]


def _temperature(number: int, params: bytes) -> float:
    try:
        named = msgspec.json.decode(params, type=_Params).temperature
    except msgspec.DecodeError as error:
        raise Unfit(f"turn {number}: the temperature cannot be read as a number") from error
    return DEFAULT if named is None else named
