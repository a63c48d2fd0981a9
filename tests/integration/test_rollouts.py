"""Rollouts: a session and those of its agents and children close, are rewarded, counted and handed out as one."""

from __future__ import annotations

import json
import statistics
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.looking import value

from integration.places import Places
from integration.routing import problems
from integration.stand import Stand, Talk, error_of, serving, user
from ops.simulator.process import SimulatorProcess

CLAUDE_CODE = {"session": "x-claude-code-session-id", "agent": "x-claude-code-agent-id"}
CODEX = {"session": "session-id", "agent": "thread-id"}
SESSIONS = {"TURNLOG_AGENTS": "sessions"}
HARNESSES = pytest.mark.parametrize("harness", [CLAUDE_CODE, CODEX], ids=["claude-code", "codex"])


@pytest.fixture(scope="module")
def used(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    """A server of the module's own, from whose feed nobody else takes groups."""
    with serving(places.new("rollouts"), sglang.base_url, environment=SESSIONS) as made:
        yield made
        assert problems(made) == []


def by_header(stand: Stand, headers: dict[str, str], text: str = "Hello", **sim: Any) -> None:
    body = {"model": "simulator", "messages": [user(text)], "sim": sim}
    response = stand.http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text


def rollout(
    stand: Stand, harness: dict[str, str] = CLAUDE_CODE, agents: tuple[str, ...] = ("one", "two"), **body: Any
) -> list[Talk]:
    """A root that a driver made, and its harness's turns: the main agent's, then one of each sub-agent."""
    root = stand.talk(**body)
    for agent in (None, *agents):
        own = {} if agent is None else {harness["agent"]: agent}
        by_header(stand, {harness["session"]: root.id, **own}, f"I am {agent}")
    return [root, *(stand.known(f"{root.id}:{agent}") for agent in agents)]


def reward(stand: Stand, talk: Talk, given: float, **more: Any) -> None:
    assert stand.http.put(f"{talk.path}/reward", json={"reward": given, **more}).status_code == 200


def close(stand: Stand, talk: Talk) -> None:
    assert stand.http.delete(talk.path).status_code == 204


def handed_out(stand: Stand, consumer: str, **asked: Any) -> list[dict[str, Any]]:
    response = stand.http.get("/export/groups", params={"consumer": consumer, "size": 100, **asked})
    assert response.status_code == 200, response.text
    lines = [json.loads(line) for line in response.content.splitlines()]
    groups = [line["group_id"] for line in lines if "rows" in line]
    acknowledged = stand.http.post("/export/groups/ack", json={"consumer": consumer, "groups": groups})
    assert acknowledged.status_code == 200
    return lines


@HARNESSES
def test_a_group_whose_rollouts_have_agents_is_complete_and_handed_out_whole(
    used: Stand, harness: dict[str, str]
) -> None:
    """Nobody closes or rewards an agent's session but through its root."""
    group = uuid.uuid4().hex
    rewards = [0.0, 1.0, 0.5]
    rollouts = [rollout(used, harness, group_id=group, attempt=number) for number in range(3)]
    handed_out(used, "before")
    for (root, *_), given in zip(rollouts, rewards, strict=True):
        assert used.get(f"/groups/{group}")["complete"] is False
        reward(used, root, given, components={"tests": given})
        close(used, root)
    found = used.get(f"/groups/{group}")
    assert (found["complete"], len(found["attempts"]), found["statistics"]["count"]) == (True, 3, 3)
    [line] = handed_out(used, "trainer")
    assert line["group_id"] == group
    assert [one["session_id"] for one in line["attempts"]] == [root.id for root, *_ in rollouts]
    assert (line["statistics"]["count"], line["excluded"]) == (3, [])
    assert [row["session_id"] for row in line["rows"]] == [talk.id for each in rollouts for talk in each]
    spread = statistics.stdev(rewards) + 1e-6
    for row in line["rows"]:
        number = [root.id for root, *_ in rollouts].index(row["rollout_id"])
        assert (row["group_id"], row["reward"], row["final"]) == (group, rewards[number], True)
        assert row["reward_components"] == {"tests": rewards[number]}
        assert row["advantage"] == pytest.approx((rewards[number] - 0.5) / spread)
        assert (row["rollout_rows"], row["rollout_weight"]) == (3, pytest.approx(1 / 3))
    assert handed_out(used, "trainer") == []


def test_closing_a_root_closes_its_rollout_and_cuts_its_turns(used: Stand) -> None:
    root, one, two = rollout(used)
    deep = used.talk(parent_session_id=one.id)
    close(used, two)
    slow = used.meanwhile(deep.chat, [user("Slow")], sim={"latency_s": 20})
    used.until_generating(deep)
    close(used, root)
    assert error_of(slow.result()) == (404, "session_closed")
    for talk in (root, one, deep):
        assert "SessionClosed" in talk.types()
    reasons = [talk.events()[-1].get("reason", "deleted") for talk in (root, one, two, deep)]
    assert reasons == ["deleted", "root", "deleted", "root"]
    assert [event["reason"] for event in deep.events() if event["type"] == "TurnAbandoned"] == ["session_closed"]


def test_nothing_begins_in_a_rollout_that_is_closed(used: Stand) -> None:
    root, one, _ = rollout(used)
    close(used, root)
    for parent in (root, one):
        refused = used.http.post("/sessions", json={"parent_session_id": parent.id})
        assert error_of(refused) == (404, "session_closed")
    late = {CLAUDE_CODE["session"]: root.id, CLAUDE_CODE["agent"]: "late"}
    body = {"model": "simulator", "messages": [user("Late")]}
    assert error_of(used.http.post("/v1/chat/completions", json=body, headers=late)) == (404, "session_closed")
    assert error_of(used.http.get(f"/sessions/{root.id}:late/events")) == (404, "session_not_found")


def test_the_roots_reward_stands_in_all_rows_before_a_childs_own(used: Stand) -> None:
    root, one, two = rollout(used)
    reward(used, one, 0.25, components={"own": 0.25})
    assert [row["reward"] for row in one.rows()] == [0.25]
    reward(used, one, 0.125, turn=1)
    reward(used, root, 1.0, components={"tests": 1.0})
    late = used.talk(parent_session_id=root.id)
    late.say("After the reward")
    reward(used, two, 0.75)
    for talk in (root, one, two, late):
        [row] = talk.rows()
        assert (row["reward"], row["reward_components"], row["rollout_id"]) == (1.0, {"tests": 1.0}, root.id)
    assert one.rows()[0]["turn_rewards"]["1"]["reward"] == 0.125
    assert one.state()["metadata"]["reward"] == 1.0
    assert len(one.rows(min_reward=1.0)) == 1


def test_erasing_a_root_erases_its_rollout(used: Stand) -> None:
    root, one, two = rollout(used, group_id=uuid.uuid4().hex)
    other = rollout(used)
    assert used.http.delete(root.path, params={"erase": "true"}).status_code == 204
    for talk in (root, one, two):
        assert talk.types()[-1] == "SessionErased"
        assert talk.rows() == []
        assert value(used.url, "SELECT count(*) FROM turns WHERE session_id = :id", id=talk.id) == 0
    assert [len(talk.rows()) for talk in other] == [1, 1, 1]
    assert used.http.delete(other[1].path, params={"erase": "true"}).status_code == 204
    assert [len(talk.rows()) for talk in other] == [1, 0, 1]


def test_a_filter_and_a_shape_of_groups_take_whole_rollouts(used: Stand) -> None:
    group = uuid.uuid4().hex
    rollouts = [rollout(used, group_id=group) for _ in range(2)]
    empty = used.talk(parent_session_id=rollouts[0][0].id)
    assert empty.types() == ["SessionCreated"]
    for given, (root, *_) in enumerate(rollouts):
        reward(used, root, float(given))
        close(used, root)
    members = {talk.id for each in rollouts for talk in each}
    assert {row["session_id"] for row in used.rows(group_id=group)} == members
    assert {row["uid"] for row in used.rows(group_id=group, shape="verl")} == {group}
    slime = used.rows(group_id=group, shape="slime")
    assert len({row["rollout_id"] for row in slime}) == 2
    [row] = used.rows(group_id=group, shape="atropos", advantage="grpo")
    assert set(row["session_ids"]) == members
    root_of = {talk.id: number for number, each in enumerate(rollouts) for talk in each}
    assert row["scores"] == [float(root_of[session_id]) for session_id in row["session_ids"]]
    by_rollout = {
        (root_of[session_id], max(advantages, key=abs))
        for session_id, advantages in zip(row["session_ids"], row["advantages"], strict=True)
    }
    assert len(by_rollout) == 2
    assert sum(advantage for _, advantage in by_rollout) == pytest.approx(0.0)


def test_a_follower_hears_of_an_erasure_and_of_a_parent_that_is_created_later(stand: Stand) -> None:
    group, between, root = (uuid.uuid4().hex for _ in range(3))
    gone, child = stand.talk(group_id=group), stand.talk(parent_session_id=between)
    for talk in (gone, child):
        talk.say("Hello")
        assert stand.http.delete(talk.path).status_code == 204

    def news(cursor: str) -> tuple[list[dict[str, Any]], str]:
        reply = stand.http.get("/export", params={"explain": "true", **({"cursor": cursor} if cursor else {})})
        found = [json.loads(line) for line in reply.content.splitlines()]
        return [row for row in found if row["session_id"] in (gone.id, child.id)], reply.headers[
            "x-turnlog-next-cursor"
        ]

    _, cursor = news("")
    assert stand.http.delete(gone.path, params={"erase": "true"}).status_code == 204
    [row], cursor = news(cursor)
    assert (row["session_id"], row["excluded"]) == (gone.id, "erased")
    for session_id, parent, rollout, group_id in ((between, root, root, None), (root, None, root, group)):
        stand.talk(session_id=session_id, parent_session_id=parent, group_id=None if parent else group)
        [row], cursor = news(cursor)
        assert (row["session_id"], row["rollout_id"], row["group_id"]) == (child.id, rollout, group_id)
        assert child.types()[-1] == "RolloutJoined"
    assert news(cursor)[0] == []


def test_a_parent_cannot_be_a_descendant(used: Stand) -> None:
    name = uuid.uuid4().hex
    child = used.talk(parent_session_id=name)
    refused = used.http.post("/sessions", json={"session_id": name, "parent_session_id": child.id})
    assert error_of(refused) == (400, "invalid_request")
    assert child.id in refused.json()["error"]["message"]


def test_a_childs_own_group_is_in_its_rows_and_counts_nowhere(used: Stand) -> None:
    group, own = uuid.uuid4().hex, uuid.uuid4().hex
    [root, _] = rollout(used, agents=("one",), group_id=group)
    child = used.talk(parent_session_id=root.id, group_id=own)
    child.say("Hello")
    reward(used, root, 1.0)
    close(used, root)
    assert [(row["group_id"], row["rollout_id"]) for row in child.rows()] == [(own, root.id)]
    assert (used.get(f"/groups/{group}")["complete"], len(used.get(f"/groups/{group}")["attempts"])) == (True, 1)
    lines = handed_out(used, uuid.uuid4().hex)
    given = {line["group_id"]: {row["session_id"] for row in line["rows"]} for line in lines}
    assert child.id in given[group]
    assert own not in given
    reasons = {line["group_id"]: line["excluded"] for line in handed_out(used, "why", explain="true")}
    assert reasons[own] == "it has no rollout: its sessions are children"
    listed = used.http.get("/groups", params={"limit": 500}).json()["groups"]
    assert {one["group_id"]: (one["sessions"], one["state"]) for one in listed if one["group_id"] in (group, own)} == {
        group: (1, "acknowledged"),
        own: (0, "open"),
    }


def test_a_root_without_turns_of_its_own_is_no_gap(used: Stand) -> None:
    """As where a harness has a thread of its own for the main agent, and its driver made the session."""
    group = uuid.uuid4().hex
    root = used.talk(group_id=group)
    by_header(used, {CODEX["session"]: root.id, CODEX["agent"]: "main"})
    reward(used, root, 1.0)
    close(used, root)
    main = f"{root.id}:main"
    [row] = used.rows(group_id=group, shape="atropos")
    assert (row["session_ids"], row["scores"], row["group_id"]) == ([main], [1.0], group)
    lines = handed_out(used, "trainer", shape="atropos")
    assert [row["session_ids"] for line in lines if line["group_id"] == group for row in line["rows"]] == [[main]]


def test_a_session_belongs_to_the_run_of_its_root(used: Stand) -> None:
    """Also a child that names no run, and the root of a child that was there before it."""
    root, missing = used.talk(run="exp-1"), uuid.uuid4().hex
    child = used.talk(parent_session_id=root.id)
    orphan = used.talk(parent_session_id=missing, run="exp-2")
    named = used.talk(session_id=missing, run="exp-2")
    root.say("Hello")
    fork = used.http.post(f"{root.path}/fork", json={"turn": 1}).json()["sessions"][0]["session_id"]
    told = {
        run: {one["session_id"] for one in used.get("/sessions", run=run)["sessions"]} for run in ("exp-1", "exp-2")
    }
    assert told == {"exp-1": {root.id, child.id, fork}, "exp-2": {orphan.id, named.id}}
    assert [used.known(one).state()["session"]["run"] for one in (child.id, fork)] == ["exp-1", "exp-1"]
    early = used.talk(parent_session_id=f"{missing}-2")
    assert early.state()["session"]["run"] == "default"
    for body in (
        {"parent_session_id": root.id, "run": "exp-2"},
        {"parent_session_id": root.id, "run": "default"},
        {"session_id": f"{missing}-2", "run": "exp-1"},
    ):
        assert error_of(used.http.post("/sessions", json=body)) == (409, "run_mismatch")
    for wrong in ("", "a b", "..", "x" * 129):
        assert error_of(used.http.post("/sessions", json={"run": wrong})) == (400, "invalid_request")
