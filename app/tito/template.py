"""A chat template as a function from messages to text, and its errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from app.errors import InvalidRequest, StartupError

Message = Mapping[str, Any]

_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""A tag that only `transformers` defines; it marks an assistant's text and does not change the output."""

_RENDERING_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Errors that a template's expressions raise on unexpected data. The template is third-party code."""


class Template:
    """The template of a `transformers` tokenizer. Thread-safe: rendering shares no state."""

    def __init__(self, tokenizer: Any) -> None:
        source = tokenizer.chat_template
        self._tokenizer = tokenizer
        self._sources: tuple[str, ...] = tuple(source.values()) if isinstance(source, dict) else (source,)

    def reads(self) -> frozenset[str]:
        """The names that the template reads: messages, tools and its arguments."""
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
        """The text. Raises InvalidRequest if the template refuses the messages or cannot render them.

        A refusal's text is repeated only if it is part of the template: otherwise it may contain a prompt.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **arguments
            )
        except _RENDERING_ERRORS as error:
            refusal = error.message if isinstance(error, jinja2.TemplateError) else None
            if refusal and any(refusal in source for source in self._sources):
                raise InvalidRequest(f"the chat template refuses these messages: {refusal}") from None
            name = type(error).__name__
            raise InvalidRequest(f"the chat template cannot render these messages ({name})") from None
        return text
