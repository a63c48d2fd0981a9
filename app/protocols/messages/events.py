"""A message as a whole stream of the Messages API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from app.protocols.messages.reply import Block
from app.protocols.sse import event


def as_stream(message: dict[str, Any]) -> bytes:
    """All events, from `message_start` to `message_stop`."""
    return named(events_of(message))


def named(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(event(data, data["type"]) for data in events)


def events_of(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    usage = message["usage"]
    begun: dict[str, Any] = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield {"type": "message_start", "message": {**message, **begun}}
    for index, block in enumerate(message["content"]):
        head, deltas = block_parts(block)
        yield {"type": "content_block_start", "index": index, "content_block": head}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield {"type": "message_delta", "delta": end, "usage": usage}
    yield {"type": "message_stop"}


def block_parts(block: Block) -> tuple[Block, list[Block]]:
    """A block's empty head, and the deltas that fill it."""
    if block["type"] == "thinking":
        thinking = {"type": "thinking_delta", "thinking": block["thinking"]}
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [thinking, signature]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": bytes(block["input"]).decode()}]
