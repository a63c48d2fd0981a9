"""Small tokenizers with real chat templates, trained once a test run. The templates come with the package `trl`."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.tito.prompts import Prompts
from tests.tools.tito_check import tokenizers

needs_templates = pytest.mark.skipif(
    tokenizers.template("qwen3") is None, reason="real chat templates come with trl: pip install --no-deps trl"
)


def tokenizer_folder(factory: pytest.TempPathFactory, family: str) -> Path:
    """What TURNLOG_TOKENIZER names; `family` is a key of `tests.tools.tito_check.tokenizers.TEMPLATES`."""
    folder = factory.getbasetemp() / "tokenizers"
    path = folder / family
    return path if path.exists() else tokenizers.save(folder, family)


def load_prompts(factory: pytest.TempPathFactory, family: str) -> Prompts:
    return Prompts.load(str(tokenizer_folder(factory, family)), tokenizers.row(family))
