"""A chat template as a function from messages to text, and what goes wrong in one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from app.errors import InvalidRequest, StartupError

Message = Mapping[str, Any]

_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""A tag that only `transformers` defines; it marks what an assistant wrote and changes nothing."""

_RENDERING_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template's own expressions raise on data they were not written for. The template is code from outside."""


class Template:
    """The template of a `transformers` tokenizer. Safe to use from several threads: rendering shares no state."""

    def __init__(self, tokenizer: Any) -> None:
        source = tokenizer.chat_template
        self._tokenizer = tokenizer
        self._sources: tuple[str, ...] = tuple(source.values()) if isinstance(source, dict) else (source,)

    def reads(self) -> frozenset[str]:
        """The names that the template takes from outside: messages, tools and its arguments."""
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        try:
            parsed = [environment.parse(_GENERATION.sub("", source)) for source in self._sources]
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(f"the chat template is not Jinja, at its line {error.lineno}") from error
        return frozenset(name for tree in parsed for name in jinja2.meta.find_undeclared_variables(tree))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        arguments: Mapping[str, Any],
        *,
        generation_prompt: bool,
    ) -> str:
        """The text; InvalidRequest where the template refuses the messages or cannot render them.

        A refusal's text is repeated only where it stands in the template itself: otherwise it may hold a prompt.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **arguments
            )
        except _RENDERING_ERRORS as error:
            said = error.message if isinstance(error, jinja2.TemplateError) else None
            if said and any(said in source for source in self._sources):
                raise InvalidRequest(f"the chat template refuses these messages: {said}") from None
            name = type(error).__name__
            raise InvalidRequest(f"the chat template cannot render these messages ({name})") from None
        return text
