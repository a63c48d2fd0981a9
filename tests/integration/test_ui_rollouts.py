"""`GET /ui/api/sessions/{id}/rollout`: a rollout beside others, all turns in short and a few with their content."""

from __future__ import annotations

import math
from typing import Any

from app.features.page.rollout_view import MAX_BYTES, MAX_STEPS, STRIP
from integration.stand import WEATHER, Stand

NOW = {"latency_s": 0}
TEXT = {**NOW, "text": "the same"}


def rollout(stand: Stand, session_id: str, **parameters: Any) -> dict[str, Any]:
    return dict(stand.get(f"/ui/api/sessions/{session_id}/rollout", **parameters))


def test_marks_are_equal_as_long_as_the_messages_are(stand: Stand) -> None:
    talks = [stand.talk(group_id="marks", attempt=number) for number in range(2)]
    for talk in talks:
        talk.say("one", sim=TEXT)
        talk.say("two", sim={**NOW, "text": "still the same"})
        talk.say("three", sim={**NOW, "text": f"from {talk.id}"})
        talk.say("four", sim={**NOW, "text": "the same again"})
    marks = [[mark for _, mark, _, _ in rollout(stand, talk.id)["marks"]] for talk in talks]
    assert [one == other for one, other in zip(*marks, strict=True)] == [True, True, False, False]


def test_marks_are_equal_whatever_ids_the_calls_have(stand: Stand) -> None:
    calls = {**NOW, "calls": [{"name": "get_weather", "arguments": {"city": "Bonn"}}]}
    ids, marks = [], []
    for number in range(2):
        talk = stand.talk(group_id="call-ids", attempt=number)
        called = talk.say("one", tools=[WEATHER], sim=calls).json()["choices"][0]["message"]
        ids.append([call["id"] for call in called["tool_calls"]])
        talk.add(*({"role": "tool", "tool_call_id": one, "content": "sunny"} for one in ids[-1]), sim=TEXT)
        marks.append([mark for _, mark, _, _ in rollout(stand, talk.id)["marks"]])
    assert ids[0] != ids[1]
    assert marks[0] == marks[1]


def test_steps_are_the_turns_messages_and_probabilities(stand: Stand) -> None:
    talk = stand.talk(group_id="steps", attempt=4)
    long = {**NOW, "completion_tokens": 3 * STRIP}
    for number in range(4):
        talk.say(f"{number}", sim=long if number == 2 else NOW)
    reward = {"reward": 0.5, "components": {"correct": 1.0}}
    assert stand.http.put(f"{talk.path}/reward", json=reward).status_code == 200
    whole = rollout(stand, talk.id, limit=MAX_STEPS)
    assert [whole[name] for name in ("reward", "components", "attempt", "group_id", "turns", "branch")] == [
        0.5,
        {"correct": 1.0},
        4,
        "steps",
        4,
        0,
    ]
    assert [entry["message"] for step in whole["steps"] for entry in step["messages"]] == talk.messages
    (row,) = talk.rows()
    sampled = [value for value, mask in zip(row["logprobs"], row["loss_mask"], strict=True) if mask]
    assert whole["output_tokens"] == len(sampled) == sum(step["output_tokens"] for step in whole["steps"])
    assert len(whole["steps"][2]["strip"]) == STRIP
    at = 0
    for step in whole["steps"]:
        own = sampled[at : at + step["output_tokens"]]
        at += len(own)
        assert math.isclose(min(step["strip"]), min(own), abs_tol=0.001)
        assert math.isclose(step["mean_logprob"], sum(own) / len(own), rel_tol=1e-6)
    part = rollout(stand, talk.id, start=1, limit=2)
    assert part["steps"] == whole["steps"][1:3]
    assert rollout(stand, talk.id)["steps"] == []
    assert rollout(stand, talk.id, start=99, limit=5)["steps"] == []


def test_branches_are_named_and_each_can_be_read(stand: Stand) -> None:
    talk = stand.talk(history="tree")
    talk.say("one", sim=NOW)
    history = list(talk.messages)
    talk.say("two", sim=NOW)
    talk.messages = history
    talk.say("else", sim=NOW)
    whole = rollout(stand, talk.id, limit=5)
    assert whole["branches"] == [
        {"branch": 0, "cause": "start", "step": 0},
        {"branch": 1, "cause": "fork", "step": 1},
    ]
    assert [step["turn"] for step in whole["steps"]] == [1, 3]
    assert [step["turn"] for step in rollout(stand, talk.id, branch=0, limit=5)["steps"]] == [1, 2]
    for parameters, status in (({"branch": 7}, 404), ({"limit": MAX_STEPS + 1}, 400), ({"start": -1}, 400)):
        response = stand.http.get(f"/ui/api/sessions/{talk.id}/rollout", params=parameters)
        assert response.status_code == status, response.text
    assert stand.http.get("/ui/api/sessions/nobody/rollout").json()["error"]["code"] == "session_not_found"


def test_a_session_without_turns_an_erased_one_and_a_long_message(stand: Stand) -> None:
    talk = stand.talk()
    assert rollout(stand, talk.id, limit=5)["marks"] == []
    talk.say("x" * (MAX_BYTES + 1), sim=NOW)
    first, second = rollout(stand, talk.id, limit=5)["steps"][0]["messages"]
    assert first["message"] is None
    assert "bytes" in first["error"]
    assert second["message"] is not None
    assert stand.http.delete(talk.path, params={"erase": True}).status_code == 204
    (step,) = rollout(stand, talk.id, limit=5)["steps"]
    assert step["error"]
    assert [entry["message"] for entry in step["messages"]] == [None]
