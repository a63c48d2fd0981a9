"""How control routes answer, as ordered with ``/sim/behaviour``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from msgspec import Struct

from ops.simulator.wire import Reply

Query = dict[str, str]
Handler = Callable[[bytes, Query], Awaitable[Reply]]

Outcome = Literal["ok", "missing", "refused", "error"]

FAILURES: dict[Outcome, tuple[str, int]] = {
    "missing": ("Not Found", 404),
    "refused": ("The request was refused, as ordered.", 400),
    "error": ("The engine failed, as ordered.", 500),
}


class Behaviour(Struct, forbid_unknown_fields=True):
    """Body of ``/sim/behaviour``: how routes answer from now on. Omitted fields keep their values. With ``dev_mode``
    false, vLLM has none of its routes that control it, and with ``scale_out`` true that deployment's route of aborts.

    ``sessions`` applies to both session routes, which take ``sessions_delay_s`` seconds in any case.
    ``health_hangs_when_paused`` is for SGLang, whose ``/health`` generates a token; vLLM's never hangs. A call that is
    set to fail has no effect.
    """

    health: Outcome = "ok"
    health_hangs_when_paused: bool = True
    sessions: Outcome = "ok"
    sessions_delay_s: float = 0.0
    dev_mode: bool = True
    scale_out: bool = False
    abort: Outcome = "ok"
    pause: Outcome = "ok"
    resume: Outcome = "ok"
    count_tokens: Outcome = "ok"
