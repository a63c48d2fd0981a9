"""A template's arguments: those of a request, as its engine makes them of `reasoning_effort`, `reasoning` and
`chat_template_kwargs`, and those that are always passed.

SGLang 0.5.23 also sets `thinking` and `enable_thinking` (`normalize_reasoning_inputs` of its `protocol.py`), vLLM 0.32
only the latter (`build_chat_params`). What the client itself set stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import InvalidRequest, StartupError
from app.tito.normalise import EngineDialect, as_doubles

_YES = frozenset({"1", "true", "yes", "y", "on"})

_HUNYUAN_WORDS = ("reasoning_effort", "reasoning_mode_token", "no_think")
"""In a template for which SGLang, with `--reasoning-parser hunyuan`, knows three efforts."""

_HUNYUAN: Mapping[Any, str] = {
    **dict.fromkeys(("none", "no_think"), "no_think"),
    **dict.fromkeys(("minimal", "low"), "low"),
    **dict.fromkeys((None, "medium", "high", "xhigh", "max"), "high"),
}


def arguments(
    own: Mapping[str, Any], effort: Any, reasoning: Any, source: str, dialect: EngineDialect = "sglang"
) -> dict[str, Any]:
    """`own`: the request's `chat_template_kwargs`. `source`: the template's text. Raises InvalidRequest."""
    if dialect == "vllm":
        if effort is None:
            return dict(own)
        return {"enable_thinking": effort != "none", **own, "reasoning_effort": effort}
    thinks = None
    if isinstance(reasoning, Mapping):
        enabled = reasoning.get("enabled")
        enabled = reasoning.get("enable", False) if enabled is None else enabled
        thinks = (enabled.strip().lower() in _YES if isinstance(enabled, str) else bool(enabled)) or None
        named = reasoning.get("effort")
        named = reasoning.get("reasoning_effort") if named is None else named
        effort = effort if named is None else named
    if effort is not None:
        thinks = effort != "none"
    given: dict[str, Any] = as_doubles(dict(own))
    if thinks is not None:
        given.setdefault("thinking", thinks)
        given.setdefault("enable_thinking", thinks)
    effort, other = _number(effort), given.pop("reasoning_effort", None)
    if all(word in source for word in _HUNYUAN_WORDS):
        effort = other if effort is None else effort
        known = _HUNYUAN.get(effort) if effort is None or isinstance(effort, str) else None
        if known is None:
            raise InvalidRequest(
                "reasoning_effort must be one of none, minimal, low, medium, high, xhigh and max: the engine "
                "accepts no other value with this chat template"
            )
        effort = known
    elif other is not None:
        effort = other
    every = given if effort is None else {"reasoning_effort": effort, **given}
    if effort == "low" and "low_effort" in source and "truncate_history_thinking" in source:
        every.setdefault("low_effort", True)
    return every


def _number(effort: Any) -> Any:
    """A fine-grained effort is a float, also where it came as text or as an integer."""
    try:
        return float(effort) if isinstance(effort, str | int) and not isinstance(effort, bool) else effort
    except (ValueError, OverflowError):
        return effort


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "glm-4.7": {"clear_thinking": False},
    "lfm2.5": {"keep_past_thinking": True},
    "nemotron-3": {"truncate_history_thinking": False},
    "qwen3.6": {"preserve_thinking": True},
    "solar": {"think_render_option": "all"},
}
"""Arguments that are always passed, which no chat template shows: those that keep the reasoning of earlier turns. A
template that reads one of them would otherwise drop stored reasoning once a user message follows. Other families read
the same ones: GLM-5, Qwen3.8, Laguna, Gemma 4."""


def pinned(family: str, reads: frozenset[str]) -> dict[str, Any]:
    """The arguments for a template that reads `reads`: all that it reads (`auto`), or those of a family.

    Raises StartupError for an unknown family, and for a template that does not read a family's arguments.
    """
    if family == "auto":
        return {name: value for row in FAMILIES.values() for name, value in row.items() if name in reads}
    check_family(family)
    for name in FAMILIES[family]:
        if name not in reads:
            raise StartupError(
                f"TURNLOG_TITO_FAMILY={family!r} does not fit the chat template, which does not read {name}"
            )
    return dict(FAMILIES[family])


def check_family(name: str) -> None:
    """Raises StartupError, which names the value and the accepted ones."""
    if name != "auto" and name not in FAMILIES:
        raise StartupError(f"TURNLOG_TITO_FAMILY={name!r}: expected auto, or one of {', '.join(FAMILIES)}")
