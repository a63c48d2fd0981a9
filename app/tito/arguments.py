"""A request's template arguments, as its engine makes them of `reasoning_effort`, `reasoning` and
`chat_template_kwargs`.

SGLang 0.5.23 also sets `thinking` and `enable_thinking` (`normalize_reasoning_inputs` of its `protocol.py`), vLLM 0.32
only the latter (`build_chat_params`). What the client itself set stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import InvalidRequest
from app.tito.normalise import EngineDialect, as_doubles

_YES = frozenset({"1", "true", "yes", "y", "on"})

_HUNYUAN: Mapping[Any, str] = {
    **dict.fromkeys(("none", "no_think"), "no_think"),
    **dict.fromkeys(("minimal", "low"), "low"),
    **dict.fromkeys((None, "medium", "high", "xhigh", "max"), "high"),
}


def takes_hunyuan_efforts(source: str) -> bool:
    """Is this template one for which SGLang, with `--reasoning-parser hunyuan`, knows three efforts?"""
    return all(word in source for word in ("reasoning_effort", "reasoning_mode_token", "no_think"))


def takes_low_effort(source: str) -> bool:
    """Is this template one for which SGLang makes `low_effort` of the effort `low`?"""
    return "low_effort" in source and "truncate_history_thinking" in source


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
        thinks = _is_enabled(reasoning) or None
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
    if takes_hunyuan_efforts(source):
        effort = _hunyuan(other if effort is None else effort)
    elif other is not None:
        effort = other
    every = given if effort is None else {"reasoning_effort": effort, **given}
    if effort == "low" and takes_low_effort(source):
        every.setdefault("low_effort", True)
    return every


def _is_enabled(reasoning: Mapping[str, Any]) -> bool:
    enabled = reasoning.get("enabled")
    enabled = reasoning.get("enable", False) if enabled is None else enabled
    return enabled.strip().lower() in _YES if isinstance(enabled, str) else bool(enabled)


def _number(effort: Any) -> Any:
    """A fine-grained effort is a float, also where it came as text or as an integer."""
    try:
        return float(effort) if isinstance(effort, str | int) and not isinstance(effort, bool) else effort
    except (ValueError, OverflowError):
        return effort


def _hunyuan(effort: Any) -> str:
    known = _HUNYUAN.get(effort) if effort is None or isinstance(effort, str) else None
    if known is None:
        raise InvalidRequest(
            "reasoning_effort must be one of none, minimal, low, medium, high, xhigh and max: the engine takes no "
            "other with this chat template"
        )
    return known
