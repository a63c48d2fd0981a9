"""Requests with junk in every place, cut and changed: each is refused, or the rest of the server can use it."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from helpers.amounts import cases
from helpers.replies import DEEP, GONE, Text, body_of, paths
from responding import TOOLS, proof

from app.domain.history import RequestHistory
from app.domain.request import ChatRequest, canonical_hash, join_object
from app.errors import InvalidRequest
from app.protocols.registry import PROTOCOLS
from app.protocols.responses.reply import read_echo

WHOLE: dict[str, Any] = {
    "messages": """{"model": "m", "max_tokens": 9, "top_k": 3, "metadata": {"user_id": "u"},
      "messages": [
        {"role": "system", "content": [{"type": "text", "text": "x-anthropic-billing-header: cch=9f;"}]},
        {"role": "user", "content": [
          {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
          {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
          {"type": "document", "title": "T", "source": {"type": "text", "media_type": "x", "data": "D"}}]},
        {"role": "assistant", "content": [
          {"type": "thinking", "thinking": "t", "signature": "tl_PROOF"}, {"type": "text", "text": "x"},
          {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1, {"b": null}]}}]},
        {"role": "user", "content": [
          {"type": "tool_result", "tool_use_id": "1", "is_error": false, "content": [
            {"type": "text", "text": "r"}, {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}]}]},
        {"role": "system", "content": "mid"}],
      "system": [{"type": "text", "text": "Be"}],
      "tools": [{"name": "f", "input_schema": {"type": "object"}, "strict": null, "defer_loading": false}],
      "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true}, "stop_sequences": ["END"],
      "thinking": {"type": "disabled", "budget_tokens": null},
      "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}}""",
    "responses": """{"model": "m", "instructions": "sys", "previous_response_id": "resp_PROOF", "metadata": {"a": "b"},
      "input": [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [
          {"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:x", "detail": "low"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}],
          "id": "rs_PROOF", "encrypted_content": "tl_PROOF"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}", "namespace": "ns"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "a"}]},
        {"type": "custom_tool_call", "id": "ctc_PROOF_0r", "call_id": "2", "name": "apply_patch", "input": "{}"},
        {"type": "item_reference", "id": "fc_PROOF_0"},
        {"type": "local_shell_call", "call_id": "3", "action": {"command": ["ls"]}}],
      "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "shell"}]},
      "text": {"format": {"type": "json_schema", "name": "s", "schema": {}, "strict": true}, "verbosity": "low"},
      "reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": false,
      "truncation": "disabled", "background": false, "top_logprobs": 0, "max_output_tokens": 9, "user": "u",
      "parallel_tool_calls": true}""",
}
WHOLE = {name: json.loads(text.replace("PROOF", proof(1))) for name, text in WHOLE.items()}
WHOLE["responses"]["tools"] = TOOLS
for whole in WHOLE.values():
    whole |= {"temperature": 0.5, "chat_template_kwargs": {"x": 1}, "stream": True, "n": 1, "input_ids": [1, 2]}
    whole["nvext"] = {"session_control": {"session_id": "s", "action": "open"}}

JUNK = [
    *("null", "true", "0", "-1", "1.5", "1e999", "9" * 5000, '""', '"x"', '"\\ud800"', '"\\u0000"', "[]", "{}", "[[]]"),
    *(
        '{"type":"text","text":"a"}',
        '[{"type":"text","text":"a"}]',
        '{"type":5}',
        '{"type":"message"}',
        "[null]",
        "tru",
    ),
    *(
        json.dumps(name)
        for name in ("user", "assistant", "text", "tool_use", "tool_result", "thinking", "image", "tool")
    ),
    *("", DEEP, '{"a":1,"a":2}', '{"INVALID_JSON":"x"}'),
]
BYTES = [b"", b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"\xff", b"\x00", b"1e9", b"1e999", b"null", b"\\ud800"]


def judge(name: str, body: bytes) -> bool:
    """Was it accepted? Then all that the server does with a request can be done."""
    try:
        asked = PROTOCOLS[name].parse(body)
        assert isinstance(asked, ChatRequest)
        incoming = RequestHistory(asked.messages, "tolerant")
        for index in range(len(incoming)):
            incoming.canonical(index)
    except InvalidRequest:
        return False
    canonical_hash(asked, "h")
    roles = [json.loads(bytes(raw))["role"] for raw in asked.messages]
    assert set(roles) <= {"system", "user", "assistant", "tool"}
    assert "system" not in roles[1:]
    json.loads(join_object({name: bytes(raw) for name, raw in asked.params.items()}), parse_int=len)
    assert asked.tools is None or json.loads(bytes(asked.tools), parse_int=len)
    assert json.loads(asked.echo or b"", parse_int=len)
    if name == "responses":
        read_echo(asked.echo)
    assert asked.protocol == name
    return True


@pytest.mark.parametrize("name", WHOLE)
def test_every_place_with_every_junk_value(name: str) -> None:
    whole = WHOLE[name]
    bodies = [body_of(whole, {at: junk}) for at in paths(whole) for junk in (*map(Text, JUNK), GONE)]
    assert judge(name, body_of(whole))
    assert len(bodies) > 2000
    assert 100 < sum(judge(name, body) for body in bodies) < len(bodies) / 2


@pytest.mark.parametrize("name", WHOLE)
def test_random_changes_and_cuts(name: str) -> None:
    whole, places = body_of(WHOLE[name]), paths(WHOLE[name])
    for seed in range(cases(2000)):
        random = Random(seed)
        at, length = random.randrange(len(whole)), random.randrange(5)
        judge(name, whole[:at] + random.choice(BYTES) + whole[at + length :])
        judge(name, whole[:at])
        first, second = random.sample(places, 2)
        if not first.startswith(second) and not second.startswith(first):
            judge(name, body_of(WHOLE[name], {place: Text(random.choice(JUNK)) for place in (first, second)}))
