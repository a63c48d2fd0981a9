"""`GET /sessions/{id}/messages`: the conversation of a branch, of open and closed sessions."""

from __future__ import annotations

from typing import Any

from integration.guarded import Guarded
from integration.stand import Stand, Talk, error_of, user


def pages(stand: Stand, talk: Talk, **parameters: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while not found or found[-1]["next_cursor"]:
        cursor = {"cursor": found[-1]["next_cursor"]} if found else {}
        found.append(stand.get(f"{talk.path}/messages", **parameters, **cursor))
    return found


def texts(page: dict[str, Any]) -> list[tuple[int, int, bool, str]]:
    return [(one["index"], one["turn"], one["sampled"], one["message"]["content"]) for one in page["messages"]]


def test_the_live_conversation_is_read_in_pages_that_stay_together(stand: Stand) -> None:
    talk = stand.talk()
    empty = stand.get(f"{talk.path}/messages")
    assert (empty["messages"], empty["turn"], empty["branch"], empty["next_cursor"]) == ([], None, None, None)
    talk.say("One", sim={"text": "1"})
    before = list(talk.messages)
    talk.say("Two", sim={"text": "2"})
    said = [(0, 1, False, "One"), (1, 1, True, "1"), (2, 2, False, "Two"), (3, 2, True, "2")]
    assert [texts(page) for page in pages(stand, talk, limit=3)] == [said[:3], said[3:]]
    first = stand.get(f"{talk.path}/messages", limit=1)
    talk.messages = before
    talk.say("Instead", sim={"text": "3"})  # rolls turn 2 back: the pages go on with what they began
    rest = stand.get(f"{talk.path}/messages", cursor=first["next_cursor"])
    assert texts(first) + texts(rest) == said
    assert texts(stand.get(f"{talk.path}/messages"))[2:] == [(2, 3, False, "Instead"), (3, 3, True, "3")]
    assert texts(stand.get(f"{talk.path}/messages", turn=2)) == said[2:]
    alone = [texts(page) for page in pages(stand, talk, turn=2, limit=1)]
    assert alone == [said[2:3], said[3:]]


def test_each_branch_of_a_tree_with_its_agent(stand: Stand) -> None:
    talk = stand.talk(history="tree")
    talk.say("Task", sim={"text": "main"})
    agent = {"x-turnlog-agent-id": "reviewer"}
    assert talk.chat([user("Review")], headers=agent, sim={"text": "fine"}).status_code == 200
    newest, main = stand.get(f"{talk.path}/messages"), stand.get(f"{talk.path}/messages", branch=0)
    assert [(one["branch"], texts(one)) for one in (newest, main)] == [
        (1, [(0, 2, False, "Review"), (1, 2, True, "fine")]),
        (0, [(0, 1, False, "Task"), (1, 1, True, "main")]),
    ]
    assert [{one["agent_id"] for one in page["messages"]} for page in (newest, main)] == [{"reviewer"}, {None}]


def test_what_is_closed_is_read_and_what_is_gone_is_told(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello", sim={"text": "Hi"})
    assert stand.http.delete(talk.path).status_code == 204
    closed = stand.get(f"{talk.path}/messages")
    assert (closed["status"], texts(closed)) == ("closed", [(0, 1, False, "Hello"), (1, 1, True, "Hi")])
    for parameters, expected in (
        ({"branch": 7}, (404, "not_found")),
        ({"turn": 7}, (404, "not_found")),
        ({"cursor": "nonsense"}, (400, "invalid_request")),
        ({"brnch": 0}, (400, "invalid_request")),
    ):
        assert error_of(stand.http.get(f"{talk.path}/messages", params=parameters)) == expected
    # What a client that asks for the closed session is told names this route.
    told = stand.http.get(talk.path)
    assert error_of(told) == (404, "session_closed")
    assert f"GET {talk.path}/messages" in told.json()["error"]["message"]
    assert stand.http.delete(f"{talk.path}?erase=true").status_code == 204
    erased = stand.http.get(f"{talk.path}/messages")
    assert error_of(erased) == (404, "session_closed")
    assert "erased" in erased.json()["error"]["message"]
    assert error_of(stand.http.get("/sessions/never-seen/messages")) == (404, "session_not_found")


def test_rewards_and_annotations_are_the_admins(guarded: Guarded) -> None:
    mine, other = guarded.client(), guarded.client()
    assert mine.chat_at(f"{mine.path}/v1/chat/completions").status_code == 200
    put = guarded.admin.put
    assert put(f"{mine.path}/reward", json={"reward": 0.5, "components": {"tests": 1.0}}).status_code == 200
    assert put(f"{mine.path}/reward", json={"reward": -1.0, "turn": 1}).status_code == 200
    assert put(f"{mine.path}/annotations/note", json={"value": "seen", "writer": "ann"}).status_code == 200
    assert put(f"{mine.path}/turns/1/annotations/judge", json={"value": {"passed": True}}).status_code == 200
    said = guarded.admin.get(f"{mine.path}/messages").json()
    assert said["reward"] == {"reward": 0.5, "components": {"tests": 1.0}}
    assert [(one["name"], one["value"], one["writer"]) for one in said["annotations"]] == [("note", "seen", "ann")]
    asked, reply = said["messages"]
    assert not {"reward", "annotations"} & set(asked)
    assert reply["reward"] == {"reward": -1.0, "components": {}}
    assert [(one["name"], one["value"]) for one in reply["annotations"]] == [("judge", {"passed": True})]
    own = mine.ask("GET", f"{mine.path}/messages").json()
    assert [one["message"] for one in own["messages"]] == [one["message"] for one in said["messages"]]
    assert "reward" not in repr(own)
    assert "annotations" not in repr(own)
    assert error_of(other.ask("GET", f"{mine.path}/messages")) == (404, "session_not_found")


def test_a_state_has_what_was_said_and_what_a_limit_refused(stand: Stand) -> None:
    talk = stand.talk(limits={"turns": 1})
    talk.say("One")
    assert error_of(talk.chat([*talk.messages, user("Two")])) == (409, "over_budget")
    for name, value, turn in (("judge", {"ok": True}, 1), ("long", "x" * 5000, 1), ("note", "seen", None)):
        assert talk.annotate(name, value, turn, writer="ann").status_code == 200
    state = stand.get(f"{talk.path}/state")
    said = {of: {one["name"]: one.get("value") for one in every} for of, every in state["annotations"].items()}
    assert said == {"0": {"note": "seen"}, "1": {"judge": {"ok": True}, "long": None}}
    assert [(one["turn"], one["limit"]) for one in state["refused"]] == [(1, "turns")]
    assert stand.get(f"{talk.path}/state", seq=state["refused"][0]["seq"] - 1)["refused"] == []
