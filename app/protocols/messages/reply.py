"""A committed reply as a message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.domain.calls import with_given_ids
from app.protocols.base import CommittedReply
from app.protocols.engine_reply import Counts, ReplyFields, read_reply, reasoning_of
from app.protocols.messages.arguments import as_input

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
    found = read_reply(reply.body)
    echo = Echo(found.model) if reply.echo is None else _ECHO.decode(reply.echo)
    content = content_of(with_given_ids(found.message, reply.given_ids), reply.proof)
    reason, matched = _stop(found, echo, any(block["type"] == "tool_use" for block in content))
    return {
        "id": f"msg_{reply.proof}",
        "type": "message",
        "role": "assistant",
        "model": echo.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": matched,
        "usage": _usage(found.counts),
    }


def content_of(message: Mapping[str, Any], proof: str) -> list[Block]:
    """Reasoning, then text, then calls. The signature names the turn."""
    blocks: list[Block] = []
    if reasoning := reasoning_of(message):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": f"tl_{proof}"})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    return blocks + [_tool_use(call) for call in message.get("tool_calls") or []]


def _tool_use(call: dict[str, Any]) -> Block:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    name = function.get("name")
    return {
        "type": "tool_use",
        "id": call.get("id"),
        "name": name if isinstance(name, str) else "",
        "input": as_input(function.get("arguments")),
    }


def _stop(found: ReplyFields, echo: Echo, calls: bool) -> tuple[str, str | None]:
    """The stop reason, and the stop sequence if it is one that the client asked for."""
    reason = found.finish_reason
    if calls and reason in ("stop", None):
        reason = "tool_calls"
    if reason == "stop" and found.matched in echo.stop_sequences:
        return "stop_sequence", found.matched
    return _STOP_REASONS.get(reason) or str(reason), None


def _usage(counts: Counts) -> dict[str, int]:
    """Cached tokens are not counted as input, as Anthropic counts them."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.sampled,
    }
