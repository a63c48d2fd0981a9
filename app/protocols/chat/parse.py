"""Parses a chat completion's request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from app.domain import control
from app.domain.continued_body import ContinuedBody, layout_of
from app.domain.known_body import LONG_BODY, BodyLayout
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


def parse_chat(body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None) -> ChatRequest:
    """`has_few_values`: the body has no more values than `bounds.FEW`. `continued`: what is known of it.

    Raises InvalidRequest, which names the field, and Unsupported for `n` other than 1.

    Messages are only split here; `history.Incoming.check` checks the new ones.
    """
    if continued is not None:
        many_values, fields = False, dict(continued.fields)
        messages: Sequence[msgspec.Raw] = continued.messages
        layout: BodyLayout | None = continued.layout
    else:
        many_values = has_many_values(body, has_few_values)
        fields = split_fields(body, many_values)
        raw = fields.pop("messages", None)
        messages = list_of("messages", raw, many_values)
        layout = layout_of(body, raw, messages) if raw is not None and len(body) >= LONG_BODY else None
    tools = fields.pop("tools", None)
    ids = token_ids(fields.pop("input_ids", None), "input_ids")
    stream = flag(fields.pop("stream", None), "stream")
    mode = stream_mode(fields)
    require_one(fields.pop("n", None))
    params = engine_params({"tools": tools, **fields} if tools is not None else fields, many_values)
    params.pop("tools", None)
    if tools is not None and bytes(tools) == b"null":
        tools = None
    own = control.remove_control(params)
    body_hash = hash_body(body) if layout is None else layout.body_hash()
    return ChatRequest(
        messages,
        tools,
        params,
        stream,
        body_hash,
        ids,
        own,
        stream_mode=mode,
        layout=layout,
        prefix=None if continued is None else continued.prefix,
    )
