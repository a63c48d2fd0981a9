"""Recorded runs as a load: whatever ids an engine gives its calls, a request's results name the calls before them."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

from ops.bench.peers.traces import FOLDER, Traces


def test_requests_follow_from_the_replies() -> None:
    recorded = [json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))]
    assert len(recorded) == 5
    for trace, dialogue in zip(recorded, islice(Traces().dialogues(), 5), strict=True):
        before: list[Any] = []
        for number, turn in enumerate(trace["turns"]):
            request = json.loads(b"".join(dialogue.body()))
            messages = request["messages"]
            assert messages[: len(before)] == before
            assert all(isinstance(message.get("content") or "", str) for message in messages)
            calls = [{**call, "id": f"own-{number}-{call['id']}"} for call in turn["reply"].get("tool_calls", ())]
            assert request["sim"]["text"] == turn["reply"].get("content", "")
            reply = {"role": "assistant", "content": "", "tool_calls": calls}
            made = {call["id"] for message in messages for call in message.get("tool_calls") or ()}
            assert {message["tool_call_id"] for message in messages if message["role"] == "tool"} <= made
            before = [*messages, reply]
            dialogue.answered(json.dumps(reply).encode())
        assert dialogue.turns == float("inf")
    assert max(len(trace["turns"]) for trace in recorded) == Traces.turns_per_session
