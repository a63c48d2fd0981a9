"""Parses a Responses request into a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from app.domain import control
from app.domain.continued_body import ContinuedBody
from app.domain.known_body import BodyLayout, State, Translation
from app.domain.request import ChatRequest, value_of
from app.errors import InvalidRequest, PreviousResponseNotFound
from app.protocols.body import (
    engine_params,
    fields_of,
    flag,
    items_of,
    require_one,
    stream_mode,
    token_ids,
)
from app.protocols.responses import ids
from app.protocols.responses.echo import Echo
from app.protocols.responses.items import Conversation
from app.protocols.responses.params import Parameters
from app.protocols.responses.tools import collect, read_choice, read_tools
from app.protocols.responses.values import text, text_or_none
from app.protocols.translation import translated

MAX_PROOFS = 1000
"""The newest that are read: they tell which of several equal turns a history continues."""

_NO_INPUT = "input must not be empty"


def parse_responses(body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None) -> ChatRequest:
    """As `chat.parse.parse_chat`. What needs a stored turn is left to `stored.complete`."""
    given, many_values = fields_of(body, has_few_values, continued)
    if "messages" in given:
        raise InvalidRequest("messages is not a field of this protocol; input is")
    stream = flag(given.pop("stream", None), "stream")
    mode = stream_mode(given)
    require_one(given.pop("n", None))
    prompt_ids = token_ids(given.pop("input_ids", None), "input_ids")
    raw_input = given.pop("input", None)
    given = engine_params(given, many_values)
    text_or_none(value_of(given.get("model"), "model"), "model")
    parameters = Parameters(given)
    instructions = text_or_none(parameters.take("instructions"), "instructions")
    previous = _previous(parameters.take("previous_response_id"))
    conversation, layout, states = _conversation(
        body, raw_input, many_values, continued, continues=previous is not None
    )
    tools = read_tools(given.pop("tools", None))
    if conversation.more_tools:
        tools = collect(conversation.more_tools, tools)
    choice = parameters.take("tool_choice")
    chosen, offered = read_choice(choice, tools)
    parameters.read()
    if chosen is not None:
        parameters.send("tool_choice", chosen)
    params = {**given, **parameters.params}
    offered_tools = tools.raw(offered)
    if offered_tools is None:
        params.pop("parallel_tool_calls", None)
    shown = {**parameters.shown, "instructions": instructions, "tool_choice": choice or "auto"}
    shown |= {"tools": tools.shown, "previous_response_id": previous and ids.RESPONSE + previous}
    references = [proof for proof in conversation.references if proof != previous]
    messages = conversation.raw("" if previous else instructions or "")
    if layout is not None:
        layout.translation = Translation(messages, states)
    return ChatRequest(
        messages,
        offered_tools,
        params,
        stream,
        prompt_ids,
        control.remove_control(params),
        "responses",
        _echo(Echo(shown, tools.named, parameters.encrypted)),
        tuple(filter(None, (previous, *conversation.proofs[-MAX_PROOFS:]))),
        previous,
        tuple(references),
        stream_mode=mode,
        layout=layout,
        prefix=None if continued is None or layout is None else continued.translated(messages),
        left_out=(*tools.left_out, *conversation.left_out, *parameters.left_out),
    )


def _echo(echo: Echo) -> bytes:
    """With sorted keys, so that a client's order of fields does not make it another one."""
    return msgspec.json.encode(echo, order="sorted")


def _previous(value: Any) -> str | None:
    """The proof in `previous_response_id`. Raises PreviousResponseNotFound for an id that is not one of ours."""
    response_id = text_or_none(value, "previous_response_id")
    proof = None if response_id is None else ids.response_proof(response_id)
    if response_id is not None and proof is None:
        raise PreviousResponseNotFound("previous_response_id names no response of this session")
    return proof


def _conversation(
    body: bytes,
    raw: msgspec.Raw | None,
    many_values: bool,
    continued: ContinuedBody | None,
    *,
    continues: bool,
) -> tuple[Conversation, BodyLayout | None, Sequence[State]]:
    """The conversation of the input, and its states and the body's layout if all of its messages are in the body.

    Raises InvalidRequest, and Unsupported for an item that cannot be carried.
    """
    conversation = Conversation(continues)
    if raw is not None and bytes(raw)[:1] == b'"':
        asked = text(value_of(raw, "input"), "input")
        if not asked:
            raise InvalidRequest(_NO_INPUT)
        conversation.add({"role": "user", "content": asked}, "input")
        return conversation, None, ()
    items, layout = items_of(body, "input", raw, many_values, continued)
    prefix = None if continued is None or continues else continued.prefix
    conversation, states = translated(conversation, items, prefix, keeps_states=layout is not None)
    if conversation.is_empty:
        raise InvalidRequest(_NO_INPUT)
    return conversation, None if continues or conversation.references else layout, states
