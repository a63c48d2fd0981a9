"""A committed reply, or one that is still generated, as a message of the Messages API and as its stream; errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from app.domain.calls import with_given_ids
from app.protocols.base import CommittedReply, FirstText
from app.protocols.engine_reply import ReplyFields, object_of, read_reply, reasoning_of
from app.protocols.errors import ErrorFields
from app.protocols.messages.conversation import as_input
from app.protocols.pieces import text_pieces
from app.protocols.sse import event

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}

_TOO_LONG = "prompt is too long"
"""Claude Code compacts its history after a 400 whose message begins like this."""


def error_body(error: ErrorFields) -> bytes:
    """The error with its stable code, where it has one."""
    message = f"{_TOO_LONG}: {error.message}" if error.is_context else error.message
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    fields: dict[str, Any] = {"type": kind, "message": message}
    if error.code is not None:
        fields["code"] = error.code
    if error.details is not None:
        fields["details"] = error.details
    return msgspec.json.encode({"type": "error", "error": fields, "request_id": error.request_id})


def error_event(error: ErrorFields) -> bytes:
    return event(msgspec.Raw(error_body(error)), "error")


Block = dict[str, Any]


class Echo(msgspec.Struct):
    """What a reply repeats of its request."""

    model: str
    stop_sequences: list[str] = []


_ECHO = msgspec.json.Decoder(Echo)

_STOP_REASONS = {
    None: "end_turn",
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
"""By finish reason; another one, such as `abort`, is a state of its own and stays as it is."""


def as_message(reply: CommittedReply) -> dict[str, Any]:
    """The message, whose tool inputs are raw JSON."""
    fields = read_reply(reply.body)
    counts = fields.counts
    echo = Echo(fields.model) if reply.echo is None else _ECHO.decode(reply.echo)
    content = content_of(with_given_ids(fields.message, reply.given_ids), reply.proof)
    reason, matched = _stop(fields, echo, any(block["type"] == "tool_use" for block in content))
    return {
        "id": f"msg_{reply.proof}",
        "type": "message",
        "role": "assistant",
        "model": echo.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": matched,
        # Cached tokens are not counted as input, as Anthropic counts them.
        "usage": {
            "input_tokens": counts.prompt - counts.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached,
            "output_tokens": counts.sampled,
        },
    }


def content_of(message: Mapping[str, Any], proof: str) -> list[Block]:
    """Reasoning, then text, then calls. The signature names the turn."""
    blocks: list[Block] = []
    if reasoning := reasoning_of(message):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": f"tl_{proof}"})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or []:
        function = object_of(call.get("function"))
        name, arguments = function.get("name"), as_input(function.get("arguments"))
        called = name if isinstance(name, str) else ""
        blocks.append({"type": "tool_use", "id": call.get("id"), "name": called, "input": arguments})
    return blocks


def _stop(fields: ReplyFields, echo: Echo, calls: bool) -> tuple[str, str | None]:
    """The stop reason, and the stop sequence if it is one that the client asked for."""
    reason = fields.finish_reason
    if calls and reason in ("stop", None):
        reason = "tool_calls"
    if reason == "stop" and fields.matched in echo.stop_sequences:
        return "stop_sequence", fields.matched
    return _STOP_REASONS.get(reason) or str(reason), None


def named(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(event(data, data["type"]) for data in events)


def events_of(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All events, from `message_start` to `message_stop`."""
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
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [*text_deltas("thinking", block["thinking"]), signature]
    if block["type"] == "text":
        return {**block, "text": ""}, text_deltas("text", block["text"])
    pieces = text_pieces(bytes(block["input"]).decode())
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]


def text_deltas(kind: str, text: str) -> list[Block]:
    """Those of a block of text or thinking."""
    return [{"type": f"{kind}_delta", kind: piece} for piece in text_pieces(text)]


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
        events = self._deltas(block["type"], text)
        if is_new:
            head, _ = block_parts(block)
            events = [self._head, {"type": "content_block_start", "index": 0, "content_block": head}, *events]
        return named(events)

    def _deltas(self, kind: str, text: str) -> list[dict[str, Any]]:
        """What fills the first block."""
        return [{"type": "content_block_delta", "index": 0, "delta": delta} for delta in text_deltas(kind, text)]

    def end(self, reply: CommittedReply) -> bytes:
        message = as_message(reply)
        events = list(events_of(message))
        if self._first.kind is None:
            return named(events)
        block = message["content"][0]
        kind = block["type"]
        text = block.get(kind, "")
        rest = self._first.rest(_KINDS.get(kind, ""), text)
        unsent = self._deltas(kind, rest) if rest else []
        return named([*unsent, *events[2 + len(text_deltas(kind, text)) :]])

    def error(self, error: ErrorFields) -> bytes:
        return error_event(error)
