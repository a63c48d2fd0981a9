"""What an engine makes of `reasoning_effort`, `reasoning` and `chat_template_kwargs`, as seen in its own prompts."""

from __future__ import annotations

from typing import Any

import pytest
from tables import rows

from app.errors import InvalidRequest
from app.tito.arguments import arguments

ON, OFF = {"thinking": True, "enable_thinking": True}, {"thinking": False, "enable_thinking": False}
HUNYUAN = "{{ reasoning_effort }}{{ reasoning_mode_token }}no_think"
LOW_EFFORT = "{{ low_effort }}{{ truncate_history_thinking }}"


@pytest.mark.parametrize(("own", "effort", "reasoning", "made"), rows("tito_sglang_efforts"))
def test_what_sglang_makes_of_an_effort(own: dict[str, Any], effort: Any, reasoning: Any, made: dict[str, Any]) -> None:
    """The template's own argument goes first, but thinking goes by the request's field."""
    assert arguments(own, effort, reasoning, "") == made


@pytest.mark.parametrize(
    ("own", "effort", "made"),
    [
        ({"a": 1}, None, {"a": 1}),
        ({}, "none", {"reasoning_effort": "none", "enable_thinking": False}),
        ({"enable_thinking": False}, "low", {"reasoning_effort": "low", "enable_thinking": False}),
        ({"reasoning_effort": "high"}, "low", {"reasoning_effort": "low", "enable_thinking": True}),
    ],
)
def test_what_vllm_makes_of_an_effort(own: dict[str, Any], effort: Any, made: dict[str, Any]) -> None:
    assert arguments(own, effort, {"effort": "none", "enabled": True}, "", "vllm") == made


@pytest.mark.parametrize(
    ("own", "effort", "made"),
    [
        ({}, None, {"reasoning_effort": "high"}),
        ({}, "minimal", {"reasoning_effort": "low", **ON}),
        ({}, "none", {"reasoning_effort": "no_think", **OFF}),
        ({"reasoning_effort": "no_think"}, None, {"reasoning_effort": "no_think"}),
        ({"reasoning_effort": "low"}, "max", {"reasoning_effort": "high", **ON}),
    ],
)
def test_hunyuans_template_knows_three_efforts(own: dict[str, Any], effort: Any, made: dict[str, Any]) -> None:
    assert arguments(own, effort, None, HUNYUAN) == made


@pytest.mark.parametrize("effort", ["ultra", 0.5])
def test_an_effort_that_hunyuans_template_has_no_tier_for_is_refused(effort: Any) -> None:
    with pytest.raises(InvalidRequest, match="reasoning_effort must be one of"):
        arguments({}, effort, None, HUNYUAN)


def test_low_effort_is_set_for_the_template_that_reads_it() -> None:
    assert arguments({}, "low", None, LOW_EFFORT)["low_effort"] is True
    assert arguments({"low_effort": False}, "low", None, LOW_EFFORT)["low_effort"] is False
    assert "low_effort" not in arguments({}, "high", None, LOW_EFFORT)
    assert "low_effort" not in arguments({}, "low", None, "")
