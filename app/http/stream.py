"""A committed reply as server-sent events: the one chunk that an OpenAI client accepts as a stream."""

from __future__ import annotations

from typing import Any

import msgspec

from app.export.jsontext import in_one_line

KEEPALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_NOT_IN_A_CHUNK = (
    "meta_info",
    "message",
    "prompt_token_ids",
    "response_token_ids",
    "token_ids",
    "routed_experts",
    "indexer_topk",
)


class _Flag(msgspec.Struct):
    stream: bool | None = None


def wants_stream(body: bytes) -> bool:
    """Does the request ask for a stream? A body that cannot be read is for the turn to refuse: False."""
    if b'"stream"' not in body:
        return False
    try:
        return bool(msgspec.json.decode(body, type=_Flag).stream)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


Fields = dict[str, msgspec.Raw]

_FIELDS = msgspec.json.Decoder(Fields)
_CHOICES = msgspec.json.Decoder(list[Fields])


def as_stream(body: bytes) -> bytes:
    """One chunk with the whole message or text, and `[DONE]`; what need not change stays raw."""
    reply: dict[str, Any] = {name: value for name, value in _FIELDS.decode(body).items() if name not in _NOT_IN_A_CHUNK}
    choices = _CHOICES.decode(reply["choices"])
    if any("message" in choice for choice in choices):
        reply["object"] = "chat.completion.chunk"
    reply["choices"] = [_choice(choice) for choice in choices]
    return b"data: " + in_one_line(msgspec.json.encode(reply)) + b"\n\n" + DONE


def _choice(choice: Fields) -> dict[str, Any]:
    """A completion's choice looks in a chunk as it does in a whole reply."""
    if "message" not in choice:
        return {name: value for name, value in choice.items() if name not in _NOT_IN_A_CHUNK}
    delta: dict[str, Any] = {**_FIELDS.decode(choice["message"])}
    calls = msgspec.json.decode(delta.pop("tool_calls", b"null"))
    if calls:
        delta["tool_calls"] = [{**call, "index": index} for index, call in enumerate(calls)]
    kept = {name: value for name, value in choice.items() if name not in _NOT_IN_A_CHUNK}
    return {"index": 0, **kept, "delta": delta}


def as_comment(text: str) -> bytes:
    """What clients skip: said in a stream whose headers have gone out already."""
    return b": " + text.encode() + b"\n\n"


def as_error_event(body: dict[str, Any] | bytes) -> bytes:
    """`body`: our own error object, or an engine's error as it came."""
    if isinstance(body, bytes):
        try:
            decoded = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            decoded = {"message": "the engine returned an error that is not JSON", "type": "upstream_error"}
        body = decoded if isinstance(decoded, dict) and "error" in decoded else {"error": decoded}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
