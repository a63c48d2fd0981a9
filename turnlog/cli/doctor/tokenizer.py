"""Checks the tokenizer: can it be loaded, render and join?"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from turnlog.cli.doctor.findings import Finding, ok, problem

if TYPE_CHECKING:
    from app.settings import Settings
    from app.tito.prompts import Prompts

_TALK = [
    {"role": "user", "content": "What is 6 times 7?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "And times 2?"},
]


def examine(settings: Settings) -> Generator[Finding, None, Prompts | None]:
    """Loading derives the junction; the rest is tried on a short conversation. Returns the loaded tokenizer."""
    if settings.tokenizer is None:
        yield ok("tokenizer", "none: prompts are sent as messages, and their ids are the engine's (capture mode)")
        return None
    from app.errors import AppError, StartupError
    from app.extras import install_command

    try:
        from app.tito.prompts import Prompts  # needs the packages of the extra `tito`
    except ImportError as error:
        yield problem("tokenizer", f"TURNLOG_TOKENIZER needs the package {error.name}", install_command("tito"))
        return None
    began = time.perf_counter()
    try:
        prompts = Prompts.load(settings.tokenizer, settings.tito_family)
        first = prompts.first(_TALK[:1], None, {})
        prompts.first(_TALK, None, {})
    except (StartupError, AppError) as error:
        yield problem("tokenizer", str(error), "see docs/tito.md, or unset TURNLOG_TOKENIZER")
        return None
    took = time.perf_counter() - began
    trims = prompts.max_trim_tokens
    yield ok(
        "tokenizer",
        f"{settings.tokenizer}: loaded in {took:.1f} s, a first prompt has {len(first)} ids, "
        f"the junction is derived ({trims} token{'' if trims == 1 else 's'} trimmed)",
    )
    return prompts
