"""How each turn of a row was sampled, and which distribution its logprobs are of."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec

from app.domain.events import LogprobsOf, TurnCommitted
from app.domain.request import number_of
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
    temperature: msgspec.Raw = msgspec.Raw(b"null")
    top_k: msgspec.Raw = msgspec.Raw(b"null")
    top_p: msgspec.Raw = msgspec.Raw(b"null")
    min_p: msgspec.Raw = msgspec.Raw(b"null")


describe(_Params)


def sampling_of(event: TurnCommitted, params: bytes) -> TurnSampling:
    """`params` are the request's, raw JSON. What is no number, or none that a row holds, is None."""
    return msgspec.structs.replace(_named(params), turn=event.turn, logprobs_of=event.logprobs_of or "unknown")


@lru_cache(maxsize=16)
def _named(params: bytes) -> TurnSampling:
    """The same of any turn: most requests of a session have the same parameters."""
    found = msgspec.json.decode(params, type=_Params)
    top_k = number_of(found.top_k)
    return TurnSampling(
        turn=0,
        logprobs_of="unknown",
        temperature=_float(found.temperature),
        top_k=top_k if isinstance(top_k, int) else None,
        top_p=_float(found.top_p),
        min_p=_float(found.min_p),
    )


def _float(raw: msgspec.Raw) -> float | None:
    value = number_of(raw)
    return None if value is None else float(value)
