"""A chat template as a function from messages to text, and its errors."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes

from app.errors import InvalidRequest, StartupError
from app.tito.continuation import Message

_MEDIA = ("image", "audio", "video", "vision")

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
    """The template of a `transformers` tokenizer. Thread-safe: rendering shares no state.

    It is rendered in the environment of `transformers`, without `apply_chat_template`: in its newest versions
    that gives a message's reasoning to the template under more names than the engines do.
    """

    def __init__(self, tokenizer: Any) -> None:
        source = tokenizer.chat_template
        self._tokenizer = tokenizer
        self._compile: Any = importlib.import_module("transformers.utils.chat_template_utils")._compile_jinja_template
        self._sources: tuple[str, ...] = tuple(source.values()) if isinstance(source, dict) else (source,)
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        try:
            self._parsed = [environment.parse(_GENERATION.sub("", source)) for source in self._sources]
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(f"the chat template is not valid Jinja at line {error.lineno}") from error

    @property
    def source(self) -> str:
        return "\n".join(self._sources)

    def reads(self) -> frozenset[str]:
        """The names that the template reads: messages, tools and its arguments."""
        return frozenset(name for tree in self._parsed for name in jinja2.meta.find_undeclared_variables(tree))

    def loops_over_content(self) -> bool:
        """Does SGLang 0.5.23 leave content lists to this template (`jinja_template_utils.py`)?

        It does for any that names a medium, or that loops over a message's content. Others get text.
        """
        if any(medium in self.source for medium in _MEDIA):
            return True
        return any(_is_content(loop.iter) for tree in self._parsed for loop in tree.find_all(nodes.For))

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
        given = {"messages": messages, "tools": tools, "add_generation_prompt": generation_prompt}
        try:
            source = self._tokenizer.get_chat_template(None, tools)
            variables = {"documents": None, **self._tokenizer.special_tokens_map, **arguments, **given}
            text: str = self._compile(source).render(variables)
        except _RENDERING_ERRORS as error:
            refusal = error.message if isinstance(error, jinja2.TemplateError) else None
            if refusal and any(refusal in source for source in self._sources):
                raise InvalidRequest(f"the chat template refuses these messages: {refusal}") from None
            name = type(error).__name__
            raise InvalidRequest(f"the chat template cannot render these messages ({name})") from None
        return text


def _is_content(node: nodes.Node) -> bool:
    """A message's content, also filtered or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        if node.node is None:
            return False
        node = node.node
    if isinstance(node, nodes.Getattr):
        name: Any = node.attr
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        name = node.arg.value
    else:
        return False
    return name == "content" and isinstance(node.node, nodes.Name) and node.node.name in ("message", "msg", "m")
