"""Parses a request of the Messages API."""

from __future__ import annotations

import msgspec

from app.domain import control
from app.domain.request import ChatRequest
from app.protocols.body import (
    engine_params,
    flag,
    has_many_values,
    hash_body,
    list_of,
    require_one,
    split_fields,
    stream_mode,
    token_ids,
)
from app.protocols.messages.conversation import conversation
from app.protocols.messages.params import engine_fields, model_of, stops_of
from app.protocols.messages.reply import Echo
from app.protocols.messages.tools import tools_of

_PREFILL = "prefilling a reply is not supported: the last message must not be the assistant's"


def parse_messages(body: bytes, has_few_values: bool = False) -> ChatRequest:
    """Raises InvalidRequest, which names the field, and Unsupported."""
    return _parse(body, has_few_values, generates=True)


def parse_count(body: bytes, has_few_values: bool = False) -> ChatRequest:
    """A request whose tokens are only counted: `max_tokens` is not needed, and a reply's beginning is counted, too."""
    return msgspec.structs.replace(_parse(body, has_few_values, generates=False), refusal=None)


def _parse(body: bytes, has_few_values: bool, *, generates: bool) -> ChatRequest:
    many_values = has_many_values(body, has_few_values)
    fields = split_fields(body, many_values)
    raws = list_of("messages", fields.pop("messages", None), many_values)
    ids = token_ids(fields.pop("input_ids", None), "input_ids")
    stream = flag(fields.pop("stream", None), "stream")
    mode = stream_mode(fields)
    require_one(fields.pop("n", None))
    params = engine_params(fields, many_values)
    echo = Echo(model_of(params), stops_of(params))
    system, tools, choice = (params.pop(name, None) for name in ("system", "tools", "tool_choice"))
    found, offered = conversation(system, raws), tools_of(tools, choice)
    params = {**engine_fields(params, has_limit=generates), **offered.params}
    return ChatRequest(
        found.messages,
        offered.raw,
        params,
        stream,
        hash_body(body, b"messages"),
        ids,
        control.remove_control(params),
        "messages",
        msgspec.json.encode(echo),
        found.proofs,
        refusal=_PREFILL if found.is_prefill else None,
        has_object_arguments=True,
        stream_mode=mode,
    )
