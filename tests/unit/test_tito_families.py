"""The table of families, and templates that are not what their name says."""

from __future__ import annotations

import pytest
from helpers.tokenizers import load_prompts, needs_templates, tokenizer_folder

from app.errors import StartupError
from app.tito.families import FAMILIES, family
from app.tito.prompts import Prompts


def test_an_unknown_family_names_the_value_and_what_is_accepted() -> None:
    with pytest.raises(StartupError, match=r"^TURNLOG_TITO_FAMILY='gpt9': accepted are auto, .*glm-4\.5$"):
        family("gpt9")


@needs_templates
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "auto"])
def test_every_family_is_what_its_real_template_says(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    named = load_prompts(tmp_path_factory, name)
    derived = Prompts.load(str(tokenizer_folder(tmp_path_factory, name)), "auto")
    assert named.max_trim_tokens == derived.max_trim_tokens == (1 if name.startswith("glm") else 0)


@needs_templates
@pytest.mark.parametrize(("name", "said"), [("glm-4.5", "qwen3"), ("qwen3", "glm-4.5"), ("llama3", "qwen3.5")])
def test_another_familys_template_stops_the_start(
    tmp_path_factory: pytest.TempPathFactory, name: str, said: str
) -> None:
    with pytest.raises(StartupError, match=f"not that of TURNLOG_TITO_FAMILY='{said}'") as error:
        Prompts.load(str(tokenizer_folder(tmp_path_factory, name)), said)
    assert "\n" not in str(error.value)
