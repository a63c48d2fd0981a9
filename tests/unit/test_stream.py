"""A committed reply as a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.replies import body_of
from helpers.streams import assembled, calls_of, chunks

from app.protocols.chat import DONE, as_stream
from app.protocols.errors import engine_error
from app.protocols.registry import PROTOCOLS
from app.protocols.sse import wants_stream

CALLS = [
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1e3}'}},
    {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]


@pytest.mark.parametrize("shape", ["sglang", "vllm"])
@pytest.mark.parametrize("calls", [[], CALLS[:1], CALLS])
def test_the_chunks(shape: str, calls: list[dict[str, Any]]) -> None:
    """Content first, then each call's head and its arguments in chunks of their own, then how it ended."""
    text = as_stream(body_of(shape, {"choices.0.message.tool_calls": calls, "choices.0.logprobs": None})).decode()
    sent = chunks(text)
    assert {chunk["object"] for chunk in sent} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in sent}) == 1
    assert "prompt_token_ids" not in text
    assert "meta_info" not in text
    choices = [chunk["choices"][0] for chunk in sent]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0]["content"] == "hé"
    said = [delta["tool_calls"][0] for delta in deltas[1:-1]]
    assert [(call["index"], call.get("id"), call["function"]["arguments"]) for call in said] == [
        part
        for index, call in enumerate(calls)
        for part in ((index, call["id"], ""), (index, None, call["function"]["arguments"]))
    ]
    assert deltas[-1] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert ["usage" in chunk for chunk in sent] == [False] * (len(sent) - 1) + [True]
    [whole] = assembled(text)["choices"]
    assert calls_of(whole["message"]) == calls_of({"tool_calls": calls})


@pytest.mark.parametrize("count", [0, 3, 1365, 1366, 4000])
@pytest.mark.parametrize("shape", ["vllm", "vllm completion"])
def test_ids_come_with_the_end_and_no_line_is_long(shape: str, count: int) -> None:
    ids = list(range(2**31 - count, 2**31))
    text = as_stream(body_of(shape, {"choices.0.token_ids": ids, "choices.0.logprobs": None})).decode()
    pieces = [chunk["choices"][0].get("token_ids") for chunk in chunks(text)]
    assert [one for piece in pieces for one in piece or ()] == ids
    assert pieces[-1] is not None
    assert max(map(len, text.splitlines())) <= 16 << 10
    without = as_stream(body_of(shape, {"choices.0.token_ids": None, "choices.0.logprobs": None})).decode()
    assert "token_ids" not in without
    if "completion" not in shape:
        assert assembled(text)["choices"][0]["message"] == assembled(without)["choices"][0]["message"]


def test_a_call_without_arguments_is_one_chunk() -> None:
    call = {"id": "a", "function": {"name": "f"}}
    sent = chunks(as_stream(body_of("sglang", {"choices.0.message.tool_calls": [call]})).decode())
    assert [chunk["choices"][0]["delta"].get("tool_calls") for chunk in sent] == [None, [{**call, "index": 0}], None]


@pytest.mark.parametrize(
    ("body", "wants"),
    [
        (b'{"stream":true}', True),
        (b'{"stream":false}', False),
        (b'{"stream":null}', False),
        (b'{"stream":1}', False),
        (b'{"messages":"\\"stream\\":true"}', False),
        (b'{"stream":true', False),
        (b'\xff"stream"', False),
        (b'{"stream":true,"a":' + b"[" * 100_000, False),
        (b"", False),
    ],
)
def test_who_wants_a_stream(body: bytes, wants: bool) -> None:
    assert wants_stream(body) is wants


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"\xff", b"7", b'{"message":"x"}', b'{"error":{"message":"x"}}', b"[" * 100_000]
)
def test_an_error_is_an_event_of_json(body: bytes) -> None:
    event = PROTOCOLS["chat"].error_event(engine_error(500, body))
    assert DONE not in event  # It would end the stream as if it were whole.
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"]
