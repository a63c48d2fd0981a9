"""Sampling parameters and a model that a session's creator pinned: no client changes them, and rows name them."""

from __future__ import annotations

from typing import Any

import pytest

from integration.stand import CHAT, SPOKEN, Stand, error_of, user
from integration.writing import Writing

PINS = {"temperature": 0.25, "top_k": 7, "max_tokens": 9, "stop": ["END"]}
SENT = {"temperature": 1.5, "top_k": 3, "seed": 4}


@pytest.mark.parametrize("protocol", SPOKEN)
def test_what_was_pinned_is_what_an_engine_is_asked_for(stand: Stand, protocol: str) -> None:
    talk = stand.talk(protocol, params=PINS, model="simulator")
    sent = SENT if protocol == "chat" else {"temperature": 0.75}
    assert talk.chat([user("Hello")], **{**sent, "model": "another"}).status_code == 200
    [asked] = stand.engine_requests(talk.id)
    assert {name: asked["body"].get(name) for name in (*PINS, "model")} == {**PINS, "model": "simulator"}
    assert asked["body"].get("seed") == sent.get("seed")
    [row] = talk.rows()
    assert row["pinned"] == {"model": "simulator", "params": PINS}


def test_a_pinned_limit_has_one_name(stand: Stand) -> None:
    """Engines prefer `max_completion_tokens`, which text completions do not know."""
    talk = stand.talk(params={"max_completion_tokens": 5})
    talk.say("Hello", max_tokens=50)
    [asked] = stand.engine_requests(talk.id)
    assert (asked["body"].get("max_completion_tokens"), asked["body"].get("max_tokens")) == (5, None)
    writing = Writing(stand, params={"max_completion_tokens": 5})
    assert stand.http.post(writing.url, json={"model": "m", "prompt": "Once"}).status_code == 200
    [asked] = stand.engine_requests(writing.id, "/v1/completions")
    assert (asked["body"].get("max_completion_tokens"), asked["body"]["max_tokens"]) == (None, 5)


def test_a_session_may_refuse_other_values(stand: Stand) -> None:
    pinned = {"params": {"temperature": 1.0, "max_tokens": 40}, "model": "simulator", "params_mode": "refuse"}
    for sent in ({}, {"temperature": 1}, {"temperature": 1.0, "seed": 4}, {"max_tokens": 40}):
        assert stand.talk(**pinned).chat([user("Hello")], **sent).status_code == 200
    talk = stand.talk(**pinned)
    other: tuple[dict[str, Any], ...] = (*({"temperature": value} for value in (0.5, True, None)),)
    for sent in (*other, {"max_completion_tokens": 50}, {"model": "another"}):
        response, [name] = talk.chat([user("Hello")], **sent), sent
        assert error_of(response) == (400, "invalid_request")
        assert response.json()["error"]["message"].startswith(f"{name} differs")
    assert talk.types() == ["SessionCreated"]


def test_what_cannot_be_pinned_is_named(stand: Stand) -> None:
    params: tuple[dict[str, Any], ...] = (
        *({"temperature": "hot"}, {"temperature": True}, {"top_k": 0.5}, {"model": "a"}, {"messages": []}),
        *({"n": 2}, {"logprobs": False}, {"max_completion_tokens": 2, "max_tokens": 1}, {"stop": ["a" * 70_000]}),
    )
    given = [({"params": one}, next(iter(one)) if "stop" not in one else "params") for one in params]
    given += [({name: value}, name) for name, value in (("params", []), ("model", ""), ("params_mode", "maybe"))]
    for body, named in given:
        response = stand.http.post("/sessions", json=body)
        assert error_of(response) == (400, "invalid_request")
        assert named in response.json()["error"]["message"]


def test_a_pinned_null_leaves_a_parameter_out(stand: Stand) -> None:
    talk = stand.talk(params={"top_p": None})
    talk.say("Hello", top_p=0.5)
    [asked] = stand.engine_requests(talk.id)
    assert "top_p" not in asked["body"]


def test_forks_and_agents_keep_what_was_pinned(stand: Stand) -> None:
    talk = stand.talk(params={"temperature": 0.25})
    talk.say("Hello")
    [fork] = stand.http.post(f"{talk.path}/fork", json={"turn": 1}).json()["sessions"]
    assert stand.known(fork["session_id"]).state()["session"]["params"] == {"temperature": 0.25}
    headers = {"x-dynamo-session-id": f"{talk.id}-agent", "x-dynamo-parent-session-id": talk.id}
    body = {"model": "m", "messages": [user("Hello")], "temperature": 1.0}
    assert stand.http.post(CHAT, json=body, headers=headers).status_code == 200
    [asked] = stand.engine_requests(f"{talk.id}-agent")
    assert asked["body"]["temperature"] == 0.25
