"""The random comparison with the engine's rendering: it holds, and it finds what is broken on purpose."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.tokenizers import needs_templates

from app.tito import junction, normalise
from app.tito.extension import Extension
from app.tito.junction import Junction
from tests.tools.tito_check.__main__ import KINDS, check
from tests.tools.tito_check.check import Mismatch

pytestmark = needs_templates


@pytest.mark.parametrize("family", list(KINDS))
def test_random_conversations_are_what_the_engine_renders(tmp_path: Path, family: str) -> None:
    compared = check(tmp_path, family)
    for number in range(6):
        compared.conversation(f"unit/{family}/{number}")
    assert compared.turns > 12
    assert compared.tally["others"] > compared.turns
    assert compared.tally["equal"] > 0


def run(tmp_path: Path, family: str) -> None:
    compared = check(tmp_path, family)
    for number in range(60):
        compared.conversation(f"broken/{family}/{number}")


def _no_newline(self: Junction, stored: Sequence[int], ids: array[int]) -> Extension:
    return Extension(0, ids[len(self.tail) :])


def _all_of_the_tail(self: Junction, stored: Sequence[int], ids: array[int]) -> Extension:
    return Extension(0, ids)


def _always_trims(self: Junction, stored: Sequence[int], ids: array[int]) -> Extension:
    return Extension(int(stored[-1] in self.stops), ids)


def _trims_what_is_no_role(self: Junction, stored: Sequence[int], ids: array[int]) -> Extension:
    return Extension(1, ids)


@pytest.mark.parametrize(
    ("family", "broken"),
    [
        ("qwen3", _no_newline),
        ("qwen3", _all_of_the_tail),
        ("glm-4.5", _all_of_the_tail),
        ("glm-4.5", _always_trims),
        ("glm-4.5", _trims_what_is_no_role),
    ],
)
def test_a_broken_junction_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, broken: Callable[..., Extension]
) -> None:
    monkeypatch.setattr(junction.Junction, "join", broken)
    with pytest.raises(Mismatch):
        run(tmp_path, family)


def _newlines(item: Any, index: int, separator: str) -> str:
    return "\n".join(part["text"] for part in item) if isinstance(item, list) else item or ""


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_content", _newlines),
        ("_arguments", lambda text: text),
        ("tools", lambda items, *, flat: items),
    ],
)
def test_a_broken_normalisation_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(normalise, name, broken)
    with pytest.raises(Mismatch):
        run(tmp_path, "qwen3")
