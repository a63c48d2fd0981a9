"""The routes that every dialect has besides generation, the simulator's own under ``/sim``, and what those report."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import Raw, Struct

from ops.simulator.engine import Behaviour, Control, Engine, Query
from ops.simulator.template import Template
from ops.simulator.wire import BadRequest, FaultOrder, PlannedReply, Reply, json_reply


class Tokenize(Struct):
    """Of SGLang's also several texts at once, or a chat."""

    prompt: str | list[str] = ""
    messages: list[Raw] | None = None
    tools: Raw = Raw(b"")


class Detokenize(Struct):
    tokens: list[int | list[int]]


class Latency(Struct, forbid_unknown_fields=True):
    """Body of ``/sim/latency``: the latency in either unit."""

    latency_s: float | None = None
    latency_ms: float | None = None


def models(engine: Engine, body: bytes, query: Query) -> Reply:
    model = engine.config.model
    card = {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": engine.config.dialect,
        "root": model,
        "parent": None,
        "max_model_len": engine.config.context_length,
    }
    return json_reply({"object": "list", "data": [card]})


def count_tokens(engine: Engine, body: bytes, query: Query) -> Reply:
    return json_reply({"input_tokens": _count(engine.template, body)})


def tokenize(engine: Engine, request: Tokenize, query: Query) -> Reply:
    length, texts = engine.config.context_length, request.prompt
    if request.messages is None and isinstance(texts, list):
        lists = [engine.tokenizer.ids(text) for text in texts]
        return json_reply({"tokens": lists, "count": [len(ids) for ids in lists], "max_model_len": length})
    if request.messages is not None:
        ids = engine.template.prompt(engine.template.read(request.messages, request.tools)).ids()
    else:
        ids = engine.tokenizer.ids(str(texts))
    return json_reply({"tokens": ids, "count": len(ids), "max_model_len": length})


def detokenize(engine: Engine, request: Detokenize, query: Query) -> Reply:
    tokens, decode = request.tokens, engine.tokenizer.decode
    text = [decode(ids) for ids in tokens if isinstance(ids, list)] or decode([t for t in tokens if type(t) is int])
    return json_reply({"prompt" if engine.config.dialect == "vllm" else "text": text})


def set_behaviour(engine: Engine, changes: dict[str, Any], query: Query) -> Reply:
    """Fields that are left out keep their values."""
    engine.behaviour = msgspec.convert(msgspec.to_builtins(engine.behaviour) | changes, Behaviour)
    return json_reply(engine.behaviour)


def add_fault(engine: Engine, order: FaultOrder, query: Query) -> Reply:
    engine.faults.add(order)
    return json_reply({"queued": engine.faults.names()})


def plan_reply(engine: Engine, planned: PlannedReply, query: Query) -> Reply:
    engine.replies.append(planned)
    return json_reply({"planned": len(engine.replies)})


def set_latency(engine: Engine, request: Latency, query: Query) -> Reply:
    seconds = request.latency_s if request.latency_s is not None else (request.latency_ms or 0.0) / 1000
    engine.latency_s = seconds
    return json_reply({"latency_s": seconds})


# What the simulator says of itself


def stats(engine: Engine, body: bytes, query: Query) -> Reply:
    runs = engine.runs
    return json_reply(
        {
            # Started are those that are finished (the aborted among them), disconnected or in flight.
            **msgspec.to_builtins(engine.counters),
            "aborted": runs.aborted,
            "disconnected": runs.disconnected,
            "in_flight": len(runs.rids),
            "in_flight_rids": runs.rids,
            "paused": runs.paused,
            "weight_version": engine.weight_version,
            "latency_s": engine.latency_s,
            "prefix_cache_tokens": engine.prefixes.tokens,
            "probes": engine.requests.probes,
            "queued_faults": engine.faults.names(),
            "open_sessions": engine.sessions,
            "closed_sessions": engine.closed,
            "requests": [seen.summary() for seen in engine.requests.last(int(query.get("last", "20")))],
        }
    )


def requests(engine: Engine, body: bytes, query: Query) -> Reply:
    seen = engine.requests.last(int(query.get("last", "1")))
    return json_reply([{**one.whole(), "adapter": engine.adapter_of(one.body)} for one in seen])


def reset(engine: Engine, body: bytes, query: Query) -> Reply:
    engine.reset()
    return json_reply({"ok": True})


# /v1/messages/count_tokens, which both engines have

Blocks = list[dict[str, Any]]


class Sent(Struct):
    """The fields of a request that make its prompt."""

    role: str
    content: str | Blocks


class AnthropicTool(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str = ""


class CountRequest(Struct):
    """Body of the route."""

    model: str
    messages: list[Sent]
    system: str | Blocks = ""
    tools: list[AnthropicTool] = []


def _count(template: Template, body: bytes) -> int:
    """The tokens of Anthropic's request as the engine's own chat. Raises BadRequest and msgspec's errors."""
    request = msgspec.json.decode(body, type=CountRequest)
    system = _text(request.system)
    chat: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in request.messages:
        chat += _chat(message)
    tools = [
        {
            "type": "function",
            "function": {"name": one.name, "description": one.description, "parameters": one.input_schema},
        }
        for one in request.tools
    ]
    raw = Raw(msgspec.json.encode(tools)) if tools else Raw(b"")
    return template.prompt(template.read([Raw(msgspec.json.encode(one)) for one in chat], raw)).count


def _chat(message: Sent) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        thinking = "".join(one.get("thinking", "") for one in blocks if one.get("type") == "thinking")
        calls = [
            {"function": {"name": one["name"], "arguments": json.dumps(one["input"], ensure_ascii=False)}}
            for one in blocks
            if one.get("type") == "tool_use"
        ]
        return [{"role": "assistant", "content": _text(blocks), "reasoning_content": thinking, "tool_calls": calls}]
    if message.role not in ("user", "system"):
        raise BadRequest(f"unknown role {message.role[:40]!r}")
    results = [
        {"role": "tool", "content": _text(one.get("content", ""))} for one in blocks if one.get("type") == "tool_result"
    ]
    text = _text(blocks)
    return [*results, {"role": message.role, "content": text}] if text or not results else results


def _text(content: str | Blocks) -> str:
    return content if isinstance(content, str) else "".join(one.get("text", "") for one in content)


COMMON = {
    ("GET", "/v1/models"): Control(models),
    ("POST", "/v1/messages/count_tokens"): Control(count_tokens, outcome="count_tokens"),
    ("POST", "/tokenize"): Control(tokenize, Tokenize),
    ("POST", "/detokenize"): Control(detokenize, Detokenize),
    ("POST", "/sim/behaviour"): Control(set_behaviour, dict[str, Any]),
    ("POST", "/sim/faults"): Control(add_fault, FaultOrder),
    ("POST", "/sim/replies"): Control(plan_reply, PlannedReply),
    ("POST", "/sim/latency"): Control(set_latency, Latency),
    ("GET", "/sim/stats"): Control(stats),
    ("GET", "/sim/requests"): Control(requests),
    ("POST", "/sim/reset"): Control(reset),
}
"""The routes of this file, by method and path."""
