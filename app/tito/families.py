"""What a chat template does not show: the arguments that keep the reasoning of earlier turns.

A template that reads one of them would otherwise drop stored reasoning once a user message follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import StartupError

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "glm-4.7": {"clear_thinking": False},
    "lfm2.5": {"keep_past_thinking": True},
    "nemotron-3": {"truncate_history_thinking": False},
    "qwen3.6": {"preserve_thinking": True},
    "solar": {"think_render_option": "all"},
}
"""Arguments that are always passed. Other families read the same ones: GLM-5, Qwen3.8, Laguna, Gemma 4."""


def pinned(family: str, reads: frozenset[str]) -> dict[str, Any]:
    """The arguments for a template that reads `reads`: all that it reads (`auto`), or those of a family.

    Raises StartupError for an unknown family, and for a template that does not read a family's arguments.
    """
    if family == "auto":
        return {name: value for row in FAMILIES.values() for name, value in row.items() if name in reads}
    check_family(family)
    for name in FAMILIES[family]:
        if name not in reads:
            raise StartupError(f"the chat template is not that of TURNLOG_TITO_FAMILY={family!r}: it reads no {name}")
    return dict(FAMILIES[family])


def check_family(name: str) -> None:
    """Raises StartupError, which names the value and the accepted ones."""
    if name != "auto" and name not in FAMILIES:
        raise StartupError(f"TURNLOG_TITO_FAMILY={name!r}: expected auto, or one of {', '.join(FAMILIES)}")
