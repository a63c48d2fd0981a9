"""`GET /ui/api/sessions/{id}/rollout`: a rollout beside others, all turns in short and a few with their messages; and
`GET /ui/api/summaries`: what sessions are about."""

from __future__ import annotations

from typing import Any

from app.features.page.rollout_view import MAX_STEPS
from app.features.page.summaries import MAX_SESSIONS
from integration.stand import WEATHER, Stand, Talk, error_of, user

NOW = {"latency_s": 0}
TEXT = {**NOW, "text": "the same"}


def rollout(stand: Stand, session_id: str, **parameters: Any) -> dict[str, Any]:
    return dict(stand.get(f"/ui/api/sessions/{session_id}/rollout", **parameters))


def test_a_turn_in_short_says_what_it_was_given_and_did(stand: Stand) -> None:
    """Two that are given different results differ before the reply, though that is the same."""
    calls = {**NOW, "text": "I look.", "calls": [{"name": "get_weather", "arguments": {"city": "Bonn"}}]}
    found = []
    for number, result in enumerate(('{"error": "no such city"}', "sunny\nand warm")):
        talk = stand.talk(group_id="in-short", attempt=number)
        (call,) = talk.say("Will it rain?", tools=[WEATHER], sim=calls).json()["choices"][0]["message"]["tool_calls"]
        talk.add({"role": "tool", "tool_call_id": call["id"], "content": result}, sim=TEXT)
        found.append(rollout(stand, talk.id)["marks"])
    (asked, failed), (same, fine) = found
    assert asked == same
    assert (asked["asked"], asked["actions"]) == (["Will it rain?"], [{"tool": "get_weather", "text": "Bonn"}])
    assert failed["given"] != fine["given"]
    assert (failed["asked"], failed["failed"]) == (["no such city"], True)
    assert (fine["asked"], fine["failed"]) == (["sunny …"], False)
    assert failed["actions"] == fine["actions"] == [{"tool": None, "text": "the same"}]


def test_steps_are_the_turns_messages(stand: Stand) -> None:
    talk = stand.talk(group_id="steps", attempt=4)
    for number in range(4):
        talk.say(f"{number}", sim=NOW)
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
    assert whole["output_tokens"] == sum(row["loss_mask"]) == sum(turn["output_tokens"] for turn in whole["marks"])
    part = rollout(stand, talk.id, start=1, limit=2)
    assert part["steps"] == whole["steps"][1:3]
    assert rollout(stand, talk.id)["steps"] == []
    assert rollout(stand, talk.id, start=99, limit=5)["steps"] == []


def summary_of(stand: Stand, session_id: str) -> dict[str, Any]:
    return dict(stand.get("/ui/api/summaries", session_id=[session_id])[session_id])


def test_a_summary_follows_its_session(stand: Stand) -> None:
    """Asked after each step or only at the end: what was read before changes nothing."""
    calls = {**NOW, "calls": [{"name": "get_weather", "arguments": {"city": "Bonn"}}], "completion_tokens": 9}
    often, late = (stand.talk(group_id="summaries", attempt=number) for number in range(2))
    seen = [summary_of(stand, often.id)]
    for talk in (often, late):

        def look(talk: Talk = talk) -> None:
            seen.extend([summary_of(stand, talk.id)] if talk is often else [])

        talk.say("\nWill it rain?\nSay yes or no.", sim=TEXT)
        look()
        history = list(talk.messages)
        talk.say("Look again.", tools=[WEATHER], sim=calls)
        look()
        fault = talk.chat([*talk.messages, user("Bad")], sim={**NOW, "fault": "missing_meta_info"})
        assert fault.status_code == 502
        reward = {"reward": 0.5, "components": {"correct": 1.0}}
        assert stand.http.put(f"{talk.path}/reward", json=reward).status_code == 200
        look()
        talk.messages = history
        talk.say("Otherwise.", sim={**NOW, "text": "It did not."})
        look()
    rain, looked = "Will it rain? …", [("get_weather", "Bonn")]
    assert [(one["task"], [tuple(action.values()) for action in one["actions"]], one["turns"]) for one in seen] == [
        ("", [], 0),
        (rain, [(None, "the same")], 1),
        *2 * [(rain, looked, 2)],
        (rain, [(None, "It did not.")], 2),
    ]
    last, cold = seen[-1], summary_of(stand, late.id)
    (row,) = often.rows()
    assert (last["tokens"], last["output_tokens"]) == (len(row["tokens"]), sum(row["loss_mask"]))
    assert (last["reward"], last["components"], last["finish_reason"]) == (0.5, {"correct": 1.0}, "stop")
    own = {"started_at", "ended_at", "tokens", "output_tokens"}
    assert {name: last[name] for name in last.keys() - own} == {name: cold[name] for name in cold.keys() - own}

    assert stand.http.delete(often.path, params={"erase": True}).status_code == 204
    erased = summary_of(stand, often.id)
    assert (erased["task"], erased["actions"], erased["components"]) == ("", [], {})
    for wrong in ([], ["a b"], ["x"] * (MAX_SESSIONS + 1)):
        response = stand.http.get("/ui/api/summaries", params={"session_id": wrong})
        assert error_of(response) == (400, "invalid_request")


def test_marks_are_equal_whatever_ids_the_calls_have(stand: Stand) -> None:
    calls = {**NOW, "calls": [{"name": "get_weather", "arguments": {"city": "Bonn"}}]}
    ids, marks = [], []
    for number in range(2):
        talk = stand.talk(group_id="call-ids", attempt=number)
        called = talk.say("one", tools=[WEATHER], sim=calls).json()["choices"][0]["message"]
        ids.append([call["id"] for call in called["tool_calls"]])
        talk.add(*({"role": "tool", "tool_call_id": one, "content": "sunny"} for one in ids[-1]), sim=TEXT)
        marks.append([turn["mark"] for turn in rollout(stand, talk.id)["marks"]])
    assert ids[0] != ids[1]
    assert marks[0] == marks[1]
