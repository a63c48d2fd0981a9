"""A committed reply as an OpenAI stream of server-sent events, sent all at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from app.domain.json_lines import in_one_line

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

_IN_EVERY_CHUNK = frozenset(("id", "object", "created", "model", "system_fingerprint", "service_tier"))
"""Fields of a reply that each chunk repeats; the others (such as `usage`) come with the last."""

_WITH_CONTENT = frozenset(("index", "logprobs"))
"""Fields of a choice that come with its content; the others (such as `finish_reason`) come with the last chunk."""


class _Flag(msgspec.Struct):
    stream: bool | None = None


def wants_stream(body: bytes) -> bool:
    """Does the request ask for a stream? False for an invalid body, which the turn rejects later."""
    if b'"stream"' not in body:
        return False
    try:
        return bool(msgspec.json.decode(body, type=_Flag).stream)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


Fields = dict[str, msgspec.Raw]

_CHUNK = msgspec.Raw(b'"chat.completion.chunk"')
_FIELDS = msgspec.json.Decoder(Fields)
_CHOICES = msgspec.json.Decoder(list[Fields])


def as_stream(body: bytes) -> bytes:
    """A whole reply as chunks and `[DONE]`; unchanged JSON stays raw.

    A chat: the message without its tool calls, each call as a head and its arguments, then the end. Clients take only
    the first of several calls in a chunk (Codex 0.58), or join their arguments (LiteLLM's adapter for Messages). A
    completion is one chunk.
    """
    reply = {name: value for name, value in _FIELDS.decode(body).items() if name not in _NOT_IN_A_CHUNK}
    choices = _CHOICES.decode(reply.pop("choices"))
    if not any("message" in choice for choice in choices):
        return _event({**reply, "choices": [_without(choice, _NOT_IN_A_CHUNK) for choice in choices]}) + DONE
    repeated = {name: value for name, value in reply.items() if name in _IN_EVERY_CHUNK}
    repeated["object"] = _CHUNK
    *first, last = [part for choice in choices for part in _parts(choice)]
    chunks = [{**repeated, "choices": [part]} for part in first]
    chunks.append({**reply, "object": _CHUNK, "choices": [last]})
    return b"".join(map(_event, chunks)) + DONE


def _parts(choice: Fields) -> Iterator[dict[str, Any]]:
    """A chat's choice, split over several chunks."""
    delta = _FIELDS.decode(choice["message"])
    calls = msgspec.json.decode(delta.pop("tool_calls", b"null")) or []
    index = choice.get("index", 0)
    with_content = {name: value for name, value in choice.items() if name in _WITH_CONTENT}
    yield {"index": index, **with_content, "delta": delta, "finish_reason": None}
    for number, call in enumerate(calls):
        for piece in _pieces(call):
            delta_of_call = {"tool_calls": [{**piece, "index": number}]}
            yield {"index": index, "delta": delta_of_call, "finish_reason": None}
    yield {"index": index, "delta": {}, **_without(choice, (*_NOT_IN_A_CHUNK, *_WITH_CONTENT))}


def _pieces(call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A tool call's head with empty arguments, then its arguments."""
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        yield call
        return
    yield {**call, "function": {**function, "arguments": ""}}
    yield {"function": {"arguments": function["arguments"]}}


def _without(fields: Fields, names: Collection[str]) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + in_one_line(msgspec.json.encode(chunk)) + b"\n\n"


def as_comment(text: str) -> bytes:
    """A comment, which clients skip, for a stream whose headers were already sent."""
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
