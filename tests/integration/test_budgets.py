"""Limits of sessions and rollouts: what is refused, what is cut, what is counted, and what rows say of it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from integration.interrupting import latency
from integration.places import Places
from integration.stand import HOURS, Stand, Talk, error_of, serving, standing, user
from ops.simulator.process import SimulatorProcess


def of_length(tokens: int, **fields: Any) -> dict[str, Any]:
    """A request whose generation has so many tokens, unless it is cut."""
    return {"sim": {"completion_tokens": tokens, "reasoning": False}, **fields}


def over(response: httpx.Response) -> None:
    assert error_of(response) == (409, "over_budget"), response.text
    assert response.headers["x-should-retry"] == "false"


def budget(talk: Talk) -> dict[str, Any]:
    [told] = talk.state()["session"]["budgets"]
    return dict(told)


@pytest.mark.parametrize("history", ["linear", "tree"])
def test_tokens_are_counted_and_refused(stand: Stand, history: str) -> None:
    talk = stand.talk(history=history, limits={"tokens": 20})
    talk.say("One", **of_length(12), headers={"idempotency-key": "one"})
    told = budget(talk)
    assert (told["used"]["tokens"], told["left"], told["in_flight"]["tokens"]) == (12, {"tokens": 8}, 0)
    [asked] = stand.engine_requests(talk.id)
    assert asked["body"]["max_tokens"] == 20  # the client gave none
    sent = [*talk.messages, user("Two")]
    over(talk.chat(sent, **of_length(30)))  # it ran into the limit: what it sampled is used
    assert budget(talk)["used"]["tokens"] == 20
    over(talk.chat(sent, **of_length(1)))
    assert talk.generations() == 2
    again = talk.chat([user("One")], **of_length(12), headers={"idempotency-key": "one"})
    assert again.headers["x-turnlog-replayed"] == "true"
    [row] = talk.rows()
    assert (row["status"], row["limit"], row["response_length"]) == ("truncated", "tokens", 12)
    assert next(event for event in talk.events() if event["type"] == "LimitReached")["sampled"] == 8
    assert talk.state()["session"]["limit"] == "tokens"


NULL = {"max_tokens": None, "max_completion_tokens": None}
WITHOUT_LIMIT: list[tuple[str, dict[str, Any], dict[str, Any], int]] = [
    ("/v1/chat/completions", {"messages": [user("Go")]}, {}, 20),
    ("/v1/chat/completions", {"messages": [user("Go")], **NULL}, {}, 20),
    ("/v1/chat/completions", {"messages": [user("Go")]}, {"params": {"max_completion_tokens": 30}}, 20),
    ("/v1/chat/completions", {"messages": [user("Go")], **NULL}, {"params": {"max_tokens": 8}}, 8),
    ("/v1/completions", {"prompt": "Go"}, {}, 20),
    ("/v1/completions", {"prompt": [1, 2, 3], **NULL}, {}, 20),
    ("/v1/completions", {"prompt": "Go", "max_tokens": 8}, {}, 8),
    ("/v1/messages", {"messages": [user("Go")], "max_tokens": 100}, {}, 20),
    ("/v1/responses", {"input": "Go"}, {}, 20),
    ("/v1/responses", {"input": "Go", "max_output_tokens": None}, {}, 20),
    ("/v1/responses/compact", {"input": "Go"}, {}, 20),
]


@pytest.mark.parametrize(("path", "body", "session", "most"), WITHOUT_LIMIT)
def test_every_generation_is_asked_for_no_more_than_is_left(
    stand: Stand, path: str, body: dict[str, Any], session: dict[str, Any], most: int
) -> None:
    talk = stand.talk(limits={"tokens": 20}, **session)
    response = stand.http.post(f"{talk.path}{path}", json={"model": "simulator", **body, **of_length(300)})
    assert response.status_code == (409 if most == 20 else 200), response.text
    route = path if path == "/v1/completions" else "/v1/chat/completions"
    [asked] = stand.engine_requests(talk.id, route)
    named = [asked["body"].get(name) for name in NULL]
    assert [value for value in named if value is not None] == [most]
    assert budget(talk)["used"]["tokens"] == most


def test_the_last_turn_ends_as_length(stand: Stand) -> None:
    talk = stand.talk(limits={"tokens": 20}, on_limit="length")
    talk.say("One", **of_length(12))
    cut = talk.say("Two", **of_length(30, max_completion_tokens=25))
    assert cut.json()["choices"][0]["finish_reason"] == "length"
    assert talk.committed()[-1]["limit"] == "tokens"
    over(talk.chat([*talk.messages, user("Three")], **of_length(1)))
    [row] = talk.rows()
    assert (row["status"], row["limit"], row["response_length"] > 20) == ("truncated", "tokens", True)
    own = stand.talk(limits={"tokens": 100})
    assert own.say("One", **of_length(30, max_tokens=4)).json()["choices"][0]["finish_reason"] == "length"
    assert "limit" not in own.rows()[0]  # its client's own


@pytest.mark.parametrize("on_limit", ["error", "length"])
def test_the_context_is_cut_where_the_prompt_is_known(tito: Stand, on_limit: str) -> None:
    measured = tito.talk()
    prompt = len(measured.say("One", **of_length(3)).json()["choices"][0]["prompt_token_ids"])
    talk = tito.talk(limits={"context": prompt + 6}, on_limit=on_limit)
    response = talk.chat([user("One")], **of_length(30, max_tokens=20))
    assert tito.engine_requests(talk.id)[-1]["body"]["max_tokens"] == 6
    if on_limit == "error":
        over(response)
        assert talk.rows() == []
        return
    assert response.json()["choices"][0]["finish_reason"] == "length"
    talk.messages = [user("One"), response.json()["choices"][0]["message"]]
    over(talk.chat([*talk.messages, user("Two")]))
    assert talk.generations() == 1
    [row] = talk.rows()
    assert (row["limit"], len(row["tokens"])) == ("context", prompt + 6)


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_time_ends_a_generation(places: Places, dialect: str) -> None:
    with standing(places.new("time"), "--dialect", dialect) as stand:
        latency(stand, HOURS)
        sim = {"completion_tokens": 50, "reasoning": False, "abort_at": [5]}
        turns = [
            (talk := stand.talk(limits={"seconds": 1.5}, **wishes), stand.meanwhile(talk.chat, [user("One")], sim=sim))
            for wishes in ({"on_limit": "length"}, {"on_limit": "length", "on_abort": "fail"}, {"on_abort": "fail"})
        ]
        for talk, turn in turns:
            response = turn.result()
            if talk is turns[-1][0]:
                over(response)
                assert budget(talk)["used"]["tokens"] == 5
                assert talk.rows() == []
            else:
                assert response.status_code == 200, response.text
                assert response.json()["choices"][0]["finish_reason"] == "length"
                [row] = talk.rows()
                assert (row["limit"], row["status"], row["response_length"]) == ("seconds", "truncated", 5)
            over(talk.chat([*talk.messages, user("Two")]))
        assert stand.stats()["in_flight"] == 0


def test_an_engine_without_room_for_all_that_is_left(stand: Stand) -> None:
    talk = stand.talk(limits={"tokens": 100_000})
    for _ in range(3):
        assert stand.sim.post("/sim/faults", json={"fault": "context_400"}).status_code == 200
    talk.say("One", **of_length(4))
    asked = [one["body"]["max_tokens"] for one in stand.engine_requests(talk.id)]
    assert asked == [100_000, 50_000, 25_000, 12_500]


def test_a_rollout_and_one_of_its_sessions_have_limits(stand: Stand) -> None:
    root = stand.talk(limits={"tokens": 30})
    child = stand.talk(parent_session_id=root.id, limits={"tokens": 10})
    other = stand.talk(parent_session_id=root.id)
    child.say("One", **of_length(6))
    over(child.chat([*child.messages, user("Two")], **of_length(9)))  # 4 more
    assert [one["used"]["tokens"] for one in child.state()["session"]["budgets"]] == [10, 10]
    other.say("One", **of_length(15))
    root.say("One", **of_length(5))
    for talk in (other, root, child):
        over(talk.chat([*talk.messages, user("More")]))
    assert budget(root)["used"] | {"seconds": 0} == {"turns": 3, "tokens": 30, "seconds": 0}
    # A parent that comes later brings its limits along.
    late = stand.talk(parent_session_id="late-root")
    late.say("One", **of_length(3))
    stand.talk(session_id="late-root", limits={"tokens": 4})
    late.say("Two", **of_length(4))
    over(late.chat([*late.messages, user("Three")]))


def test_a_bad_limit_is_named(stand: Stand) -> None:
    wrong = {"tokens": 0, "turns": 1.5, "seconds": -1, "context": "9", "token": 9, "per": "group"}
    for given, named in (*(({name: value}, f"limits.{name}") for name, value in wrong.items()), ([], "limits")):
        response = stand.http.post("/sessions", json={"limits": given})
        assert error_of(response) == (400, "invalid_request")
        assert response.json()["error"]["message"].startswith(f"{named}:")


def test_the_fleets_limits_are_those_of_sessions_that_give_none(places: Places, sglang: SimulatorProcess) -> None:
    environment = {"TURNLOG_LIMITS": '{"tokens": 7, "turns": 9}'}
    with serving(places.new("fleet"), sglang.base_url, environment=environment) as stand:
        assert stand.talk().state()["session"]["limits"] == {"tokens": 7, "turns": 9}
        assert stand.talk(limits={}).state()["session"]["limits"] is None
        root = stand.talk()
        assert stand.talk(parent_session_id=root.id).state()["session"]["limits"] is None
        header = {"x-session-id": "by-header"}
        body = {"model": "m", "messages": [user("One")], **of_length(8)}
        assert stand.http.post("/v1/chat/completions", json=body, headers=header).status_code == 409


@pytest.mark.parametrize("protocol", ["messages", "responses"])
def test_each_protocol_has_its_own_shape(stand: Stand, protocol: str) -> None:
    talk = stand.talk(protocol, limits={"tokens": 5}, on_limit="length")
    cut = talk.say("One", **({"max_tokens": 50} if protocol == "messages" else {"max_output_tokens": 50}))
    assert (cut.json().get("stop_reason") or cut.json()["status"]) in ("max_tokens", "incomplete")
    refused = talk.chat([*talk.messages, user("Two")])
    assert refused.status_code == 409
    assert refused.headers["x-should-retry"] == "false"
    if protocol == "messages":
        assert refused.json()["type"] == "error"
    else:
        assert refused.json()["error"]["code"] == "over_budget"


def test_an_agents_session_has_the_limits_of_its_parent(stand: Stand) -> None:
    root = stand.talk(history="linear", limits={"tokens": 8, "per": "session"}, on_limit="length")
    headers = {"x-turnlog-session-id": root.id, "x-turnlog-agent-id": "helper"}
    body = {"model": "m", "messages": [user("One")], **of_length(20)}
    reply = stand.http.post("/v1/chat/completions", json=body, headers=headers)
    assert reply.json()["usage"]["completion_tokens"] == 8
    assert budget(root)["left"] == {"tokens": 8}
    assert budget(stand.known(f"{root.id}:helper"))["left"] == {"tokens": 0}


def test_a_fork_begins_anew_and_keeps_the_limits(stand: Stand) -> None:
    talk = stand.talk(limits={"tokens": 10}, on_limit="length")
    talk.say("One", **of_length(10))
    made = stand.http.post(f"/sessions/{talk.id}/fork", json={"turn": 1}).json()["sessions"][0]
    fork = stand.known(made["session_id"])
    fork.messages = list(talk.messages)
    fork.say("Two", **of_length(7))
    assert budget(fork)["left"] == {"tokens": 3}
    over(talk.chat([*talk.messages, user("Two")]))


def test_bad_parameters_of_a_session_with_limits(stand: Stand) -> None:
    talk = stand.talk(limits={"tokens": 9})
    for given in (0, "5", 1.5, True):
        assert error_of(talk.chat([user("One")], max_tokens=given))[0] == 400
    assert talk.generations() == 0
    parent = stand.http.post("/sessions", json={"limits": {"turns": 1, "per": "rollout"}, "parent_session_id": "p"})
    assert parent.json()["error"]["message"].startswith("limits.per must be session")
