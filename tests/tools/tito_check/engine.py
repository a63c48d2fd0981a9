"""What the engine itself would render: `apply_chat_template` of the tokenizer over messages as SGLang hands them on.

Written apart from `app.tito.normalise`, after SGLang 0.5.23's `serving_chat.py` and `protocol.py`, so that the two can
be compared.
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]


class Engine:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        source = tokenizer.chat_template
        self._takes_parts = "image" in source or "in m.content" in source

    def ids(
        self, messages: list[Message], tools: list[Any] | None, arguments: dict[str, Any], *, prompt: bool = True
    ) -> list[int]:
        shown = [self.shown(message) for message in messages]
        schemas = [dumped(tool) for tool in tools] if tools else None
        ids: list[int] = self._tokenizer.apply_chat_template(
            shown, tools=schemas, add_generation_prompt=prompt, tokenize=True, return_dict=False, **arguments
        )
        return ids

    def shown(self, message: Message) -> Message:
        shown = {key: value for key, value in message.items() if value is not None}
        content = message.get("content")
        if content is None:
            shown["content"] = ""
        elif isinstance(content, list) and (message["role"] == "tool" or not self._takes_parts):
            shown["content"] = " ".join(part["text"] for part in content)
        if message.get("tool_calls"):
            shown["tool_calls"] = [_parsed(call) for call in message["tool_calls"]]
        return shown


def _parsed(call: Message) -> Message:
    function = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
    return {**call, "function": function}


def dumped(tool: Message) -> Message:
    function = {"description": None, "parameters": None, **tool["function"]}
    order = [*tool["function"], *(key for key in ("description", "parameters") if key not in tool["function"])]
    return {"type": "function", "function": {key: function[key] for key in order}, "defer_loading": None}
