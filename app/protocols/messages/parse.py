"""Parses a request of the Messages API."""

from __future__ import annotations

import msgspec

from app.domain import control
from app.domain.continued_body import ContinuedBody
from app.domain.known_body import Translation
from app.domain.left_out import SERVER_TOOL, left_out_at
from app.domain.request import ChatRequest
from app.protocols.body import (
    engine_params,
    fields_of,
    flag,
    items_of,
    require_one,
    stream_mode,
    token_ids,
)
from app.protocols.messages.conversation import conversation
from app.protocols.messages.params import engine_fields, model_of, stops_of
from app.protocols.messages.reply import Echo
from app.protocols.messages.tools import tools_of

_PREFILL = "prefilling a reply is not supported: the last message must not be the assistant's"


def parse_messages(body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None) -> ChatRequest:
    """As `chat.parse.parse_chat`. Raises InvalidRequest, which names the field, and Unsupported."""
    return _parse(body, has_few_values, continued, generates=True)


def parse_count(body: bytes, has_few_values: bool = False) -> ChatRequest:
    """A request whose tokens are only counted: `max_tokens` is not needed, and a reply's beginning is counted, too."""
    return msgspec.structs.replace(_parse(body, has_few_values, None, generates=False), refusal=None)


def _parse(body: bytes, has_few_values: bool, continued: ContinuedBody | None, *, generates: bool) -> ChatRequest:
    fields, many_values = fields_of(body, has_few_values, continued)
    raws, layout = items_of(body, "messages", fields.pop("messages", None), many_values, continued)
    ids = token_ids(fields.pop("input_ids", None), "input_ids")
    stream = flag(fields.pop("stream", None), "stream")
    mode = stream_mode(fields)
    require_one(fields.pop("n", None))
    params = engine_params(fields, many_values)
    echo = Echo(model_of(params), stops_of(params))
    system, tools, choice = (params.pop(name, None) for name in ("system", "tools", "tool_choice"))
    prefix = None if continued is None else continued.prefix
    found = conversation(system, raws, prefix, keeps_states=layout is not None)
    if layout is not None:
        layout.translation = Translation(found.messages, found.states)
    offered = tools_of(tools, choice)
    left_out = offered.left_out
    if bytes(params.pop("mcp_servers", b"[]")) not in (b"[]", b"null"):
        left_out = (*left_out, left_out_at(SERVER_TOOL, "mcp_servers"))
    params = {**engine_fields(params, has_limit=generates), **offered.params}
    return ChatRequest(
        found.messages,
        offered.raw,
        params,
        stream,
        ids,
        control.remove_control(params),
        "messages",
        msgspec.json.encode(echo),
        found.proofs,
        refusal=_PREFILL if found.is_prefill else None,
        has_object_arguments=True,
        stream_mode=mode,
        layout=layout,
        prefix=None if continued is None else continued.translated(found.messages),
        left_out=left_out,
    )
