"""Completes a request with the stored turns that it refers to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.domain.proofs import find_proof
from app.domain.request import ChatRequest
from app.errors import InvalidRequest, PreviousResponseNotFound
from app.protocols.base import StoredTurn
from app.protocols.responses import ids
from app.protocols.responses.echo import read_echo
from app.protocols.responses.items import BETWEEN_SYSTEM, REFERENCE

_MARK = msgspec.json.encode(REFERENCE)


def complete_request(request: ChatRequest, turns: Mapping[str, StoredTurn]) -> ChatRequest:
    """`turns` are those that it continues and needs, by proof. Raises PreviousResponseNotFound, and InvalidRequest for
    an item that the session does not have."""
    if request.continues is None and not request.needs:
        return request
    messages = [_filled(raw, turns) if _MARK in bytes(raw) else raw for raw in request.messages]
    if request.continues is not None:
        turn = turns.get(request.continues)
        if turn is None:
            raise PreviousResponseNotFound("previous_response_id names no response of this session")
        messages = [*_history(turn, read_echo(request.echo).instructions), *messages]
    return msgspec.structs.replace(request, messages=messages)


def _history(turn: StoredTurn, instructions: str) -> list[msgspec.Raw]:
    """A stored turn's messages with these instructions instead of its own."""
    before = read_echo(turn.echo).instructions
    if before == instructions:
        return turn.messages
    first: Any = msgspec.json.decode(turn.messages[0])
    has_system = first.get("role") == "system" and isinstance(first.get("content"), str)
    rest = _without(first["content"], before) if has_system else ""
    texts = [one for one in (instructions, rest) if one]
    system = [msgspec.Raw(msgspec.json.encode({"role": "system", "content": BETWEEN_SYSTEM.join(texts)}))]
    return [*(system if texts else []), *turn.messages[1 if has_system else 0 :]]


def _without(content: str, instructions: str) -> str:
    if not instructions or not content.startswith(instructions):
        return content
    return content[len(instructions) :].removeprefix(BETWEEN_SYSTEM)


def _filled(raw: msgspec.Raw, turns: Mapping[str, StoredTurn]) -> msgspec.Raw:
    """A message whose places are filled with what they refer to."""
    message = msgspec.json.decode(raw)
    for key in ("content", "reasoning_content"):
        if _is_place(message.get(key)):
            message[key] = _referred(message[key][REFERENCE], turns)
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = [_referred(call[REFERENCE], turns) if _is_place(call) else call for call in calls]
    return msgspec.Raw(msgspec.json.encode(message))


def _is_place(value: Any) -> bool:
    return isinstance(value, dict) and REFERENCE in value


def _referred(item_id: str, turns: Mapping[str, StoredTurn]) -> Any:
    """The reasoning, the text or the call that an item's id names."""
    found = ids.output_item(item_id)
    turn = turns.get(find_proof(item_id) or "")
    if found is None or turn is None:
        raise InvalidRequest(f"item_reference {item_id} names no output item of this session")
    reply: Any = msgspec.json.decode(turn.messages[-1])
    if found[0] == ids.REASONING:
        return reply.get("reasoning_content") or reply.get("reasoning")
    if found[0] == ids.MESSAGE:
        return reply.get("content")
    calls = reply.get("tool_calls") or []
    if found[1] >= len(calls):
        raise InvalidRequest(f"item_reference {item_id} names no output item of this session")
    return calls[found[1]]
