"""A message's events while it is generated: those of the first block, if that is text or thinking.

Every `content_block_stop` waits for the commit, since Claude Code takes a stream that ends after one as the reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.protocols.base import CommittedReply
from app.protocols.errors import ErrorFields
from app.protocols.live import FirstText
from app.protocols.messages.errors import error_body
from app.protocols.messages.events import block_parts, events_of, named
from app.protocols.messages.reply import as_message, content_of
from app.protocols.sse import event

_KINDS = {"thinking": "reasoning", "text": "content"}


class LiveMessage:
    def __init__(self, begun: CommittedReply) -> None:
        self._proof = begun.proof
        self._head = next(events_of(as_message(begun)))
        self._first = FirstText()

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        is_new = self._first.kind is None
        text = self._first.add(delta)
        if not text:
            return b""
        [block] = content_of({self._first.kind or "": text}, self._proof)
        head, (filled, *_) = block_parts(block)
        events: list[dict[str, Any]] = [{"type": "content_block_delta", "index": 0, "delta": filled}]
        if is_new:
            events = [self._head, {"type": "content_block_start", "index": 0, "content_block": head}, *events]
        return named(events)

    def end(self, reply: CommittedReply) -> bytes:
        message = as_message(reply)
        events = list(events_of(message))
        if self._first.kind is None:
            return named(events)
        block = message["content"][0]
        rest = self._first.rest(_KINDS.get(block["type"], ""), block.get(block["type"], ""))
        [filled, *_] = block_parts({**block, block["type"]: rest})[1]
        delta = [{**events[2], "delta": filled}] if rest else []
        return named([*delta, *events[3:]])

    def error(self, error: ErrorFields) -> bytes:
        return event(msgspec.Raw(error_body(error)), "error")
