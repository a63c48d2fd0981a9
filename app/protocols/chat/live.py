"""A chat's reply as chunks while it is generated. The finish reason, `[DONE]` and the logprobs wait for the commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.protocols.base import CommittedReply
from app.protocols.chat.calls import LiveIds
from app.protocols.chat.events import call_pieces, chunks_of, fields_of, parts_of, repeated_fields
from app.protocols.errors import ErrorFields, openai_error
from app.protocols.sse import event


class LiveChat:
    def __init__(self, begun: CommittedReply) -> None:
        self._repeated = repeated_fields(fields_of(begun.body))
        self._sent: set[str] = set()
        self._ids = LiveIds(begun.proof)

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        texts = {name: text for name, text in delta.items() if name != "tool_calls"}
        if not self._sent:
            texts = {"role": "assistant", **texts}
            self._sent.add("role")
        self._sent.update(texts)
        deltas = [texts] if texts else []
        for call in map(self._ids.of, delta.get("tool_calls", ())):
            deltas += [{"tool_calls": [{**piece, "index": call["index"]}]} for piece in call_pieces(call)]
        return b"".join(map(self._chunk, deltas))

    def _chunk(self, delta: Mapping[str, Any]) -> bytes:
        return event({**self._repeated, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def end(self, reply: CommittedReply) -> bytes:
        """The message's fields that were not sent, the logprobs, and the end."""
        fields = fields_of(reply.body)
        first, *_, last = parts_of(fields)
        unsent = {name: value for name, value in first["delta"].items() if name not in self._sent}
        return chunks_of(fields, [{**first, "delta": unsent}, last])

    def error(self, error: ErrorFields) -> bytes:
        """Without `[DONE]`, which would end the stream as if it were whole."""
        return event(msgspec.Raw(openai_error(error)))
