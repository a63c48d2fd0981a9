"""Reads a message's content that is a list of text parts, as Mistral's API and some proxies before engines send it."""

from __future__ import annotations

from typing import Any, NamedTuple

_TEXTS = ("text", "output_text")


class Parts(NamedTuple):
    """The text of a content, and of its parts that are reasoning."""

    text: str
    reasoning: str


def text_of_parts(content: Any) -> Parts | None:
    """None where it has a part that is neither text nor reasoning."""
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    reasoning: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        thought = part["thinking"] if kind == "thinking" and "thinking" in part else None
        if kind in _TEXTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(thought, str):
            reasoning.append(thought)
        elif (inner := text_of_parts(thought)) is not None:
            reasoning.append(inner.text)
        else:
            return None
    return Parts("".join(texts), "".join(reasoning))
