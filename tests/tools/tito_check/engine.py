"""What an engine would render: the template over messages as SGLang hands them on.

Written apart from `app.tito.normalise`, after SGLang 0.5.23's `serving_chat.py` and `protocol.py`, so that the two can
be compared. Where a template takes no objects as arguments, or no text as content, it gets what it takes.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

from app.tito.normalise import MessageFormat

Message = dict[str, Any]

_PINNED: dict[str, Any] = {
    **dict.fromkeys(("preserve_thinking", "keep_past_thinking"), True),
    **dict.fromkeys(("clear_thinking", "truncate_history_thinking"), False),
    "think_render_option": "all",
}

REFUSALS = (Exception,)
"""A template is third-party code: whatever it raises, it does not render these messages."""


class Engine:
    def __init__(self, tokenizer: Any, message_format: MessageFormat) -> None:
        self._tokenizer = tokenizer
        self._format = message_format
        source = str(tokenizer.chat_template)
        # Not `apply_chat_template`: in its newest versions it gives the template more than SGLang does.
        self._render: Any = (
            importlib.import_module("transformers.utils.chat_template_utils")._compile_jinja_template(source).render
        )
        self._pinned = {name: value for name, value in _PINNED.items() if name in source}

    def text(
        self, messages: list[Message], tools: list[Any] | None, arguments: dict[str, Any], *, prompt: bool = True
    ) -> str | None:
        """None if the template refuses the messages."""
        variables: dict[str, Any] = {
            **self._tokenizer.special_tokens_map,
            **arguments,
            **self._pinned,
            "messages": [self._shown(message) for message in messages],
            "tools": [self._dumped(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": prompt,
        }
        try:
            text: str = self._render(**variables)
        except REFUSALS:
            return None
        return text

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _shown(self, message: Message) -> Message:
        shown = {key: value for key, value in message.items() if value is not None}
        content = message.get("content") or ""
        if isinstance(content, list) and (message["role"] == "tool" or "sglang" not in self._format.lists):
            content = " ".join(part["text"] for part in content)
        if self._format.parts and isinstance(content, str):
            content = [{"type": "text", "text": content}] if content else []
        shown["content"] = content
        if message.get("tool_calls") and not self._format.text_arguments:
            shown["tool_calls"] = [_parsed(call) for call in message["tool_calls"]]
        return shown

    def _dumped(self, tool: Message) -> Message:
        function = {"description": None, "parameters": None, **tool["function"]}
        order = [*tool["function"], *(key for key in ("description", "parameters") if key not in tool["function"])]
        dumped = {key: function[key] for key in order}
        return dumped if self._format.flat_tools else {"type": "function", "function": dumped, "defer_loading": None}


def _parsed(call: Message) -> Message:
    function = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
    return {**call, "function": function}
