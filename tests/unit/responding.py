"""Responses requests and engine replies for the tests of that protocol, and how clients send a reply back."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from helpers.replies import sglang, vllm
from openai.types.responses import Response

from app.domain.calls import given_ids, sampled_calls
from app.domain.canonical import canonical_hash
from app.protocols.base import CommittedReply
from app.protocols.responses import RESPONSES

Json = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "name": "shell",
        "description": "runs",
        "parameters": {"type": "object"},
        "strict": False,
        "async": False,
        "allowed_callers": ["direct"],
    },
    {"type": "namespace", "name": "ns", "description": "more", "tools": [{"type": "function", "name": "look"}]},
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
    },
]

TEXTS = [
    "",
    "x",
    " padded ",
    "héllo 日本 🎉",
    "line\nbreak\r\n\u2028\u2029",
    '"quoted" \\ {"a": 1}',
    "\0\x1f",
    "long " * 5000,
]
ARGUMENTS = ["", "{}", '{"cmd": "ls",  "n": 1e3}', '{"s": "\\ud800 lone"}', '{"b":1,"a":[2]}', "not json", '{"x":"🎉"}']
INPUTS = [
    '{"input": "*** Begin Patch"}',
    '{"input":""}',
    '{"input":"\\ud800"}',
    '{"input": 5}',
    '{"other": "x"}',
    "raw",
]


def proof(turn: int) -> str:
    return f"{turn}_{turn:024x}"


def engine_reply(random: Random, turn: int = 1) -> Json:
    """A sound reply of either engine: text, reasoning and calls, each with a chance."""
    make = random.choice([sglang, vllm])
    reply = make()
    choice = reply["choices"][0]
    reasoning = random.choice([None, "", *TEXTS])
    calls = [_call(random, f"call_{turn}_{index}") for index in range(random.choice([0, 0, 1, 2, 4]))]
    content = random.choice([None if calls or reasoning else "", *TEXTS])
    choice["message"] = {"role": "assistant", "content": content, "tool_calls": calls or None}
    choice["message"]["reasoning_content" if make is sglang else "reasoning"] = reasoning
    choice["finish_reason"] = random.choice(["stop", "tool_calls", "length", "content_filter"])
    reply["usage"]["prompt_tokens_details"] = random.choice([None, {"cached_tokens": 2}])
    return reply


def _call(random: Random, call_id: str) -> Json:
    name, arguments = random.choice([("shell", ARGUMENTS), ("ns__look", ARGUMENTS), ("apply_patch", INPUTS)])
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": random.choice(arguments)}}


def request(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "input": "hi", "tools": TOOLS, **fields}).encode()


def committed(reply: Json, turn: int = 1, **fields: Any) -> CommittedReply:
    calls = sampled_calls(json.dumps(reply["choices"][0]["message"]).encode())
    given = given_ids(calls, "responses", lambda: proof(turn), [])
    return CommittedReply(json.dumps(reply).encode(), proof(turn), RESPONSES.parse(request(**fields)).echo, given)


def parsed(items: list[Json], **fields: Any) -> list[Json]:
    """The chat messages of a request."""
    return [json.loads(bytes(raw)) for raw in RESPONSES.parse(request(input=items, **fields)).messages]


def hashes(messages: list[Json]) -> list[str]:
    return [canonical_hash(message, "tolerant") for message in messages]


def _dumped(items: list[Json]) -> list[Json]:
    whole = {"id": "r", "created_at": 0, "model": "m", "object": "response", "parallel_tool_calls": True}
    response = Response.model_validate({**whole, "tool_choice": "auto", "tools": [], "output": items})
    return [item.model_dump() for item in response.output]


def _without(*names: str) -> Callable[[list[Json]], list[Json]]:
    return lambda items: [{key: value for key, value in item.items() if key not in names} for item in items]


CLIENTS: dict[str, Callable[[list[Json]], list[Json]]] = {
    "as they came": lambda items: items,
    "model_dump": _dumped,
    "other key order": lambda items: [dict(reversed(item.items())) for item in items],
    "no reasoning": lambda items: [item for item in items if item["type"] != "reasoning"],
    "only encrypted": lambda items: [
        {**item, "content": None} if item["type"] == "reasoning" else item for item in items
    ],
    "no ids": _without("id"),
    "no status": _without("status", "annotations"),
    "references": lambda items: [{"type": "item_reference", "id": item["id"]} for item in items],
}
"""What clients make of a reply's items before they send them back."""
