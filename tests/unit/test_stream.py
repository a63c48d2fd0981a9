"""A committed reply as one chunk."""

from __future__ import annotations

import json
from typing import Any

import pytest
from replies import body_of, put

from app.http.stream import DONE, as_error_event, as_stream, wants_stream


def chunk_of(stream: bytes) -> dict[str, Any]:
    data, done, rest = stream.split(b"\n\n")
    assert (done + b"\n\n", rest) == (DONE, b"")
    found: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
    return found


@pytest.mark.parametrize("shape", ["sglang", "vllm"])
def test_the_chunk(shape: str) -> None:
    calls = [{"id": "a", "function": {"name": "f"}}, {"id": "b", "function": {"name": "g"}}]
    chunk = chunk_of(as_stream(body_of(shape, put("choices.0.message.tool_calls", calls))))
    assert (chunk["object"], chunk["usage"]["completion_tokens"]) == ("chat.completion.chunk", 2)
    assert "prompt_token_ids" not in chunk
    (choice,) = chunk["choices"]
    assert not {"message", "meta_info", "token_ids", "prompt_token_ids"} & set(choice)
    assert (choice["finish_reason"], choice["delta"]["content"]) == ("stop", "hé")
    assert [call["index"] for call in choice["delta"]["tool_calls"]] == [0, 1]


def test_no_calls_are_no_list() -> None:
    assert "tool_calls" not in chunk_of(as_stream(body_of("vllm")))["choices"][0]["delta"]


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
    event = as_error_event(body)
    assert event.endswith(b"\n\n")
    assert "error" in json.loads(event.removeprefix(b"data: "))
