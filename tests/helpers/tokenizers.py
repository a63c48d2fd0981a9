"""Small tokenizers with real chat templates, made once a test run. The templates come with the package `trl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.tito.continuation import Extension
from app.tito.prompts import Prompts
from tests.tools.tito_check import tokenizers

needs_templates = pytest.mark.skipif(
    tokenizers.template("qwen3") is None, reason="real chat templates come with trl: pip install --no-deps trl"
)

ANSWER = {"role": "assistant", "content": "Yes"}


def tokenizer_folder(factory: pytest.TempPathFactory, family: str) -> Path:
    """What TURNLOG_TOKENIZER names; `family` is a key of `tests.tools.tito_check.tokenizers.TEMPLATES`."""
    folder = factory.getbasetemp() / "tokenizers"
    path = folder / family
    return path if path.exists() else tokenizers.save(folder, family)


def load_prompts(factory: pytest.TempPathFactory, family: str) -> Prompts:
    return Prompts.load(str(tokenizer_folder(factory, family)))


def after(
    prompts: Prompts,
    stored: Sequence[int],
    new: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    answer: Mapping[str, Any] = ANSWER,
) -> Extension:
    """What continues `stored`, which ends with `answer`."""
    before = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look at it."}]
    return prompts.after(stored[-1], before, answer, new, tools, arguments or {})
