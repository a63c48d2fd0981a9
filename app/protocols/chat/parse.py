"""Parses a chat completion's request."""

from __future__ import annotations

from app.domain import control
from app.domain.continued_body import ContinuedBody
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
from app.protocols.chat.left_out import ORIGINAL, Places, offered_tools, with_known_details


def parse_chat(body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None) -> ChatRequest:
    """`has_few_values`: the body has no more values than `bounds.FEW`. `continued`: what is known of it.

    Raises InvalidRequest, which names the field, and Unsupported for `n` other than 1.

    Messages are only split here; `history.Incoming.check` checks the new ones.
    """
    fields, many_values = fields_of(body, has_few_values, continued)
    messages, layout = items_of(body, "messages", fields.pop("messages", None), many_values, continued)
    tools = fields.pop("tools", None)
    ids = token_ids(fields.pop("input_ids", None), "input_ids")
    stream = flag(fields.pop("stream", None), "stream")
    mode = stream_mode(fields)
    require_one(fields.pop("n", None))
    params = engine_params({"tools": tools, **fields} if tools is not None else fields, many_values)
    params.pop("tools", None)
    if tools is not None and bytes(tools) == b"null":
        tools = None
    left_out: Places = ()
    details: Places = ()
    if tools is not None:
        tools, left_out = offered_tools(tools, params)
    known, known_bytes = (0, 0) if continued is None else (continued.prefix.messages, continued.prefix.end)
    if body.find(ORIGINAL, known_bytes) >= 0:
        messages, details = with_known_details(messages, known)
    if details:
        layout = None  # Its messages are not the body's: the next body is read as a whole.
    own = control.remove_control(params)
    return ChatRequest(
        messages,
        tools,
        params,
        stream,
        ids,
        own,
        stream_mode=mode,
        layout=layout,
        prefix=None if continued is None else continued.history(),
        left_out=(*left_out, *details),
    )
