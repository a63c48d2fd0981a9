"""Parses a Responses request into a chat."""

from __future__ import annotations

from typing import Any

import msgspec

from app.domain import control
from app.domain.request import ChatRequest, value_of
from app.errors import InvalidRequest, PreviousResponseNotFound
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
from app.protocols.responses import ids
from app.protocols.responses.echo import Echo
from app.protocols.responses.items import Conversation
from app.protocols.responses.params import Parameters
from app.protocols.responses.tools import collect, read_choice, read_tools
from app.protocols.responses.values import text, text_or_none
from workers.depth import MAX_DEPTH, too_deep

MAX_PROOFS = 1000
"""The newest that are read: they tell which of several equal turns a history continues."""

_NO_INPUT = "input must not be empty"


def parse_responses(body: bytes, has_few_values: bool = False) -> ChatRequest:
    """As `chat.parse.parse_chat`. What needs a stored turn is left to `stored.complete`."""
    many_values = has_many_values(body, has_few_values)
    given = split_fields(body, many_values)
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
    conversation = Conversation(previous is not None)
    _add_input(conversation, raw_input, many_values)
    tools = read_tools(given.pop("tools", None))
    if conversation.more_tools:
        tools = collect(conversation.more_tools, tools)
    choice = parameters.take("tool_choice")
    chosen, offered = read_choice(choice, tools)
    parameters.read()
    if chosen is not None:
        parameters.send("tool_choice", chosen)
    params = {**given, **parameters.params}
    if not tools.functions:
        params.pop("parallel_tool_calls", None)
    shown = {**parameters.shown, "instructions": instructions, "tool_choice": choice or "auto"}
    shown |= {"tools": tools.shown, "previous_response_id": previous and ids.RESPONSE + previous}
    references = [proof for proof in conversation.references if proof != previous]
    return ChatRequest(
        conversation.raw("" if previous else instructions or ""),
        tools.raw(offered),
        params,
        stream,
        hash_body(body, b"responses"),
        prompt_ids,
        control.remove_control(params),
        "responses",
        _echo(Echo(shown, tools.named, parameters.encrypted)),
        tuple(filter(None, (previous, *conversation.proofs[-MAX_PROOFS:]))),
        previous,
        tuple(references),
        stream_mode=mode,
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


def _add_input(conversation: Conversation, raw: msgspec.Raw | None, many_values: bool) -> None:
    """Raises InvalidRequest, and Unsupported for an item that cannot be carried."""
    if raw is not None and bytes(raw)[:1] == b'"':
        asked = text(value_of(raw, "input"), "input")
        if not asked:
            raise InvalidRequest(_NO_INPUT)
        conversation.add({"role": "user", "content": asked}, "input")
        return
    for index, item in enumerate(list_of("input", raw, many_values)):
        path = f"input[{index}]"
        if too_deep(bytes(item)):
            raise InvalidRequest(f"{path} nests deeper than {MAX_DEPTH} levels")
        conversation.add(value_of(item, path), path)
    if not conversation.messages and not conversation.system:
        raise InvalidRequest(_NO_INPUT)
