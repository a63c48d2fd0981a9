"""A template as a function: what it reads, and what it says when it fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.tokenizers import needs_templates, tokenizer_folder
from tables import rows

from app.errors import InvalidRequest, StartupError
from app.tito.template import Template
from tests.tools.tito_check.tokenizers import load

pytestmark = needs_templates

USER = [{"role": "user", "content": "secret"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tokenizer_folder(tmp_path_factory, "qwen2.5"))


def of(tokenizer: Any, source: str | dict[str, str]) -> Template:
    tokenizer.chat_template = source
    return Template(tokenizer)


def test_names_from_outside_are_read_off_the_source(tokenizer: Any) -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{%- endgeneration -%}{% break %}{% endfor %}"
    both = {"default": source, "tool_use": source + "{% if thinks is defined %}{% endif %}"}
    assert of(tokenizer, source).reads() == {"messages"}
    assert of(tokenizer, both).reads() == {"messages", "thinks"}


def test_what_is_not_jinja_names_its_line() -> None:
    with pytest.raises(StartupError, match="not valid Jinja at line 2"):
        Template(SimpleNamespace(chat_template="\n{% if %}")).reads()


@pytest.mark.parametrize(("body", "message"), rows("tito_template_errors"))
def test_an_error_repeats_the_templates_own_words_and_nothing_else(tokenizer: Any, body: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        of(tokenizer, "{{ " + body + " }}").render(USER, None, {}, generation_prompt=True)
    assert str(error.value) == message


def test_arguments_tools_and_the_generation_prompt_reach_it(tokenizer: Any) -> None:
    template = of(tokenizer, "{{ tools[0].name }} {{ mood }} {{ add_generation_prompt }} {{ messages[0].content }}")
    assert (
        template.render(USER, [{"name": "look"}], {"mood": "good"}, generation_prompt=True) == "look good True secret"
    )
