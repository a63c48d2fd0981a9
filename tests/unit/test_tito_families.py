"""Template arguments that are always passed, by family."""

from __future__ import annotations

import pytest
from helpers.tokenizers import needs_templates, tokenizer_folder

from app.errors import StartupError
from app.tito.arguments import FAMILIES, check_family, pinned
from app.tito.prompts import Prompts


def test_an_unknown_family_names_the_value_and_what_is_accepted() -> None:
    with pytest.raises(StartupError, match=r"^TURNLOG_TITO_FAMILY='gpt9': expected auto, .*solar$"):
        check_family("gpt9")
    for name in ("auto", *FAMILIES):
        check_family(name)


def test_auto_is_whatever_the_template_reads() -> None:
    assert pinned("auto", frozenset({"tools", "clear_thinking", "preserve_thinking"})) == {
        "clear_thinking": False,
        "preserve_thinking": True,
    }
    assert pinned("qwen3.6", frozenset({"preserve_thinking", "clear_thinking"})) == {"preserve_thinking": True}


@needs_templates
def test_another_familys_template_stops_the_start(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(
        StartupError,
        match=r"TURNLOG_TITO_FAMILY='glm-4\.7' does not fit the chat template, which does not read clear_thinking",
    ):
        Prompts.load(str(tokenizer_folder(tmp_path_factory, "qwen3")), "glm-4.7")
