"""A committed reply as a stream of chat completion chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from app.protocols.sse import event

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
    reply = _without(_FIELDS.decode(body), _NOT_IN_A_CHUNK)
    choices = _CHOICES.decode(reply["choices"])
    if not any("message" in choice for choice in choices):
        return event({**reply, "choices": [_without(choice, _NOT_IN_A_CHUNK) for choice in choices]}) + DONE
    return chunks_of(reply, [part for choice in choices for part in _parts(choice)])


def chunks_of(reply: Fields, parts: Sequence[Mapping[str, Any]]) -> bytes:
    """The parts as chunks, to the end of the stream; the last has also what no other repeats."""
    *first, last = parts
    repeated = repeated_fields(reply)
    chunks = [{**repeated, "choices": [part]} for part in first]
    chunks.append({**_without(reply, _NOT_IN_A_CHUNK), "object": _CHUNK, "choices": [last]})
    return b"".join(map(event, chunks)) + DONE


def repeated_fields(reply: Fields) -> Fields:
    """What each chunk of a reply has."""
    return {**{name: value for name, value in reply.items() if name in _IN_EVERY_CHUNK}, "object": _CHUNK}


def fields_of(body: bytes) -> Fields:
    found: Fields = _FIELDS.decode(body)
    return found


def parts_of(reply: Fields) -> list[dict[str, Any]]:
    """A chat's only choice: the message without its calls, the calls' pieces, and the end."""
    [choice] = _CHOICES.decode(reply["choices"])
    return list(_parts(choice))


def _parts(choice: Fields) -> Iterator[dict[str, Any]]:
    """A chat's choice, split over several chunks."""
    delta = _FIELDS.decode(choice["message"])
    calls = msgspec.json.decode(delta.pop("tool_calls", b"null")) or []
    index = choice.get("index", 0)
    with_content = {name: value for name, value in choice.items() if name in _WITH_CONTENT}
    yield {"index": index, **with_content, "delta": delta, "finish_reason": None}
    for number, call in enumerate(calls):
        for piece in call_pieces(call):
            delta_of_call = {"tool_calls": [{**piece, "index": number}]}
            yield {"index": index, "delta": delta_of_call, "finish_reason": None}
    yield {"index": index, "delta": {}, **_without(choice, (*_NOT_IN_A_CHUNK, *_WITH_CONTENT))}


def call_pieces(call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A tool call's head with empty arguments, then its arguments."""
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        yield call
        return
    yield {**call, "function": {**function, "arguments": ""}}
    yield {"function": {"arguments": function["arguments"]}}


def _without(fields: Fields, names: Collection[str]) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}
