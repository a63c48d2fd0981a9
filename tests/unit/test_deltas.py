"""What engines stream of tool calls, and of unknown fields, is joined to what they would have sent as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.upstream.deltas import MAX_CALLS, JoinedMessage
from workers.parse_json import Rejected

RECORDINGS = json.loads((Path(__file__).parent / "recordings" / "tool_deltas.json").read_text())
"""Deltas as parsers and proxies send them, made up in their shape, with what they mean: id, name and arguments."""


def joined(*deltas: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole message, and what was told while it came."""
    message = JoinedMessage()
    told = [message.add(delta) for delta in deltas]
    told.append({"tool_calls": message.rest()})
    return message.whole(), told


def calls_told(told: list[dict[str, Any]]) -> list[list[Any]]:
    """As a client joins the pieces of each index; each call's head must come before those of the calls behind it."""
    calls: list[list[Any]] = []
    for piece in (piece for news in told for piece in news.get("tool_calls", ())):
        if piece["index"] == len(calls):
            calls.append([piece["id"], "", ""])
        function = piece["function"]
        calls[piece["index"]][1] += function.get("name", "")
        calls[piece["index"]][2] += function["arguments"]
    return calls


@pytest.mark.parametrize("name", RECORDINGS)
def test_calls_are_neither_merged_nor_lost_nor_renamed(name: str) -> None:
    recording = RECORDINGS[name]
    if "refused" in recording:
        with pytest.raises(Rejected, match=recording["refused"]):
            joined(*recording["deltas"])
        return
    message, told = joined(*recording["deltas"])
    found = [[call["id"], call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]]
    assert found == recording["calls"]
    assert calls_told(told) == recording["calls"]


def test_what_is_not_known_is_carried() -> None:
    signed = {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}", "strict": True}, "signature": "s"}
    message, told = joined(
        {"content": "Hel", "reasoning_details": [], "refusal": None},
        {"content": "lo", "reasoning_details": [{"n": 1}], "score": 1, "audio": {"id": "x", "data": "ab"}},
        {"reasoning_details": [{"n": 2}], "score": 2, "audio": {"data": "cd"}, "tool_calls": [signed]},
    )
    call = {"id": "a", "type": "function", "function": signed["function"], "signature": "s"}
    assert message == {
        "role": "assistant",
        "content": "Hello",
        "reasoning_details": [{"n": 1}, {"n": 2}],
        "score": 2,
        "audio": {"id": "x", "data": "abcd"},
        "tool_calls": [call],
    }
    assert [news.get("reasoning_details") for news in told] == [[], [{"n": 1}], [{"n": 2}], None]
    assert told[2]["tool_calls"] == [{"index": 0, **call}]


def test_text_in_parts_is_text() -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    message, told = joined({"content": [thought, {"type": "text", "text": "a"}]}, {"content": "b"})
    assert message == {"role": "assistant", "content": "ab", "reasoning_content": "hm"}
    assert told[0] == {"content": "a", "reasoning_content": "hm"}


def test_more_calls_than_a_request_can_send_back_are_refused() -> None:
    message = JoinedMessage()
    heads = [{"index": index, "function": {"name": "f"}} for index in range(MAX_CALLS + 1)]
    with pytest.raises(Rejected, match="tool calls"):
        message.add({"tool_calls": heads})
