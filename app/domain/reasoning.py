"""Reasoning inside a message's content: what an engine without a reasoning parser returns, and harnesses move or drop.

<think>Paris is cold.</think>Take a coat.        ─┐
Paris is cold.</think>Take a coat.                │  the same text: Take a coat.
[{"type": "thinking", …}, {"type": "text", …}]   ─┘
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REASONING_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel>", "<channel|>"),
)
"""What families open and close reasoning with: Qwen, DeepSeek, GLM, Kimi, Nemotron and MiniMax; prompted models;
Seed-OSS; Magistral; Command A; gpt-oss; Gemma 4."""

_PARTS = ("thinking", "redacted_thinking", "reasoning")


def without_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message without leading reasoning in its content; the message itself if it has none."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if not (isinstance(part, Mapping) and part.get("type") in _PARTS)]
        texts = [text for part in parts if isinstance(part, Mapping) and isinstance(text := part.get("text"), str)]
        if len(texts) < len(parts):
            return message if len(parts) == len(content) else {**message, "content": parts}
        bare = _behind_reasoning("".join(texts))
    elif isinstance(content, str):
        bare = _behind_reasoning(content)
        if bare is content:
            return message
    else:
        return message
    return {**message, "content": bare}


def _behind_reasoning(text: str) -> str:
    """What follows leading reasoning. Reasoning that is not closed has nothing behind it; reasoning may be closed
    without being opened, where the chat template opens it."""
    begun = text.lstrip()
    for opening, closing in REASONING_TAGS:
        if begun.startswith(opening):
            return begun.partition(closing)[2]
    for opening, closing in REASONING_TAGS:
        end = text.find(closing)
        if end >= 0 and opening not in text[:end]:
            return text[end + len(closing) :]
    return text
