"""The random comparison with a template's own rendering: it holds, and it finds what is broken on purpose."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.tokenizers import needs_templates

from app.tito import battery, continuation, normalise
from app.tito.continuation import Extension
from tests.tools.tito_check import tokenizers
from tests.tools.tito_check.__main__ import check
from tests.tools.tito_check.check import Check
from tests.tools.tito_check.conversations import KINDS

pytestmark = needs_templates

FAMILIES = (*tokenizers.TEMPLATES,)


def checked(tmp_path: Path, family: str, conversations: int) -> Check:
    source = tokenizers.template(tokenizers.TEMPLATES[family])
    assert source is not None
    compared = check(tmp_path, source)
    for number in range(conversations):
        for what in KINDS:
            compared.conversation(f"unit/{number}", what)
    return compared


@pytest.mark.parametrize("family", FAMILIES)
def test_random_conversations_are_what_the_template_renders(tmp_path: Path, family: str) -> None:
    compared = checked(tmp_path, family, 2)
    assert compared.turns - compared.refused.total() > 3
    assert compared.wrong == []


def _all_of_the_ending(self: object, alone: array[int], followed: array[int], last: int, *, called: bool) -> Extension:
    return Extension(0, followed)


def _always_trims(self: object, alone: array[int], followed: array[int], last: int, *, called: bool) -> Extension:
    return Extension(1, followed)


def _newlines(item: Any, *_: Any) -> str:
    return "\n".join(part["text"] for part in item) if isinstance(item, list) else item or ""


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (continuation.ContinuationRule, "join", _all_of_the_ending),
        (continuation.ContinuationRule, "join", _always_trims),
        (normalise, "_content", _newlines),
        (normalise, "_sglang_arguments", lambda text, *_: text),
        (normalise, "tools", lambda items, *_: items),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "glm-4.5"])
def test_what_is_broken_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, where: Any, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(battery, "_wrong", lambda *_, **__: {})  # which would refuse it at start
    monkeypatch.setattr(where, name, broken)
    assert checked(tmp_path, family, 4).wrong
