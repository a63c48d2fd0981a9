"""How each turn of a row was sampled, and which distribution its logprobs are of."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec

from app.domain.events import LogprobsOf, TurnCommitted
from workers.codec import describe


class TurnSampling(msgspec.Struct, frozen=True):
    """Turn `turn`'s sampling parameters as its request named them, None where it named none: then the engine's own
    default holds, which may come from the model's `generation_config.json`."""

    turn: int
    logprobs_of: LogprobsOf | Literal["unknown"]
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None


class _Params(msgspec.Struct, frozen=True):
    temperature: object = None
    top_k: object = None
    top_p: object = None
    min_p: object = None


describe(_Params)


def sampling_of(event: TurnCommitted, params: bytes) -> TurnSampling:
    """`params` are the request's, raw JSON. What is no number is None."""
    return msgspec.structs.replace(_named(params), turn=event.turn, logprobs_of=event.logprobs_of or "unknown")


@lru_cache(maxsize=16)
def _named(params: bytes) -> TurnSampling:
    """The same of any turn: most requests of a session have the same parameters."""
    found = msgspec.json.decode(params, type=_Params)
    return TurnSampling(
        turn=0,
        logprobs_of="unknown",
        temperature=_number(found.temperature),
        top_k=found.top_k if isinstance(found.top_k, int) and not isinstance(found.top_k, bool) else None,
        top_p=_number(found.top_p),
        min_p=_number(found.min_p),
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
