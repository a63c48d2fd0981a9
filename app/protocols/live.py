"""The first text of a reply that is still being generated: Messages and Responses send blocks one after the other, and
the end of a block waits for the commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from app.errors import UpstreamInvalid


class FirstText:
    """`kind` is None until there is something to send."""

    def __init__(self) -> None:
        self.kind: Literal["reasoning", "content"] | None = None
        self._pieces: list[str] = []

    def add(self, delta: Mapping[str, Any]) -> str:
        """What of the delta belongs to the first text. Whitespace does not begin one: reasoning may yet come."""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text: str = reasoning if self.kind == "reasoning" else delta.get("content") or ""
        if self.kind is None and reasoning:
            self.kind, self._pieces, text = "reasoning", [], reasoning
        if text:
            self._pieces.append(text)
        if self.kind is None and text.strip():
            self.kind, text = "content", "".join(self._pieces)
        return "" if self.kind is None else text

    def rest(self, kind: str, text: str) -> str:
        """What is left of the committed reply's first text.

        Raises UpstreamInvalid if the reply does not begin with what was sent.
        """
        sent = "".join(self._pieces)
        if kind != self.kind or not text.startswith(sent):
            raise UpstreamInvalid("the reply does not begin with what the engine streamed first")
        return text[len(sent) :]
