"""Sessions named by headers: agents of their own, parents, and what cannot be told apart."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.streams import assembled

from integration.places import Places
from integration.stand import HOURS, SPOKEN, Stand, Talk, error_of, serving, until, user
from ops.simulator.process import SimulatorProcess

TOLD = "x-turnlog-session-id"
KEY, USER = "prompt_cache_key", "metadata.user_id"


class Agent:
    """An agent of a harness that names its session by headers alone."""

    def __init__(self, stand: Stand, **headers: str) -> None:
        self._stand = stand
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.messages: list[dict[str, Any]] = []

    def chat(self, text: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "simulator", "messages": [*self.messages, user(text)], **fields}
        sent = {**self.headers, **(headers or {})}
        return self._stand.http.post("/v1/chat/completions", json=body, headers=sent)

    def say(self, text: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
        response = self.chat(text, headers, **fields)
        assert response.status_code == 200, response.text
        self.messages += [user(text), response.json()["choices"][0]["message"]]


def fresh() -> str:
    return uuid.uuid4().hex


def session_of(stand: Stand, session_id: str) -> Talk:
    return Talk(stand, session_id)


def config(stand: Stand, session_id: str) -> dict[str, Any]:
    created: dict[str, Any] = session_of(stand, session_id).events()[0]
    assert created["type"] == "SessionCreated"
    found: dict[str, Any] = created["config"]
    return found


def turns(stand: Stand, session_id: str) -> int:
    return len(session_of(stand, session_id).committed())


LINEAR, TREE = {"history": "linear"}, {"history": "tree"}


@pytest.mark.parametrize(
    ("root", "has_session", "is_branch"),
    [(None, False, True), ({}, False, True), (TREE, False, True), (LINEAR, False, False), (TREE, True, False)],
    ids=["by-header", "undecided", "tree", "linear", "agent-has-session"],
)
def test_an_agent_is_a_branch_or_has_a_session_of_its_own(
    stand: Stand, root: dict[str, str] | None, has_session: bool, is_branch: bool
) -> None:
    """Either way its rows are the same rollout's."""
    session, own = (name := fresh()), f"{name}:one"
    if root is not None:
        stand.talk(session_id=session, **root)
    if has_session:
        stand.talk(session_id=own, parent_session_id=session)
    main = Agent(stand, x_claude_code_session_id=session)
    for agent in (main, Agent(stand, **main.headers, x_claude_code_agent_id="one")):
        agent.say("Work")
        agent.say("More")
    committed = session_of(stand, session).committed()
    branches = [(turn["branch"], turn.get("branch_cause"), turn.get("agent_id")) for turn in committed]
    mains, its = [(0, "start", None), (0, None, None)], [(1, "agent", "one"), (1, None, "one")]
    assert branches == (mains + its if is_branch else mains)
    assert stand.http.get(f"/sessions/{own}").status_code == (404 if is_branch else 200)
    rows = [row for name in (session, own) for row in session_of(stand, name).rows()]
    assert [(row["rollout_id"], len(row["turns"])) for row in rows] == [(session, 2)] * 2


@pytest.fixture(scope="module")
def odd(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    """A server whose agents have sessions of their own, and that knows sessions by a request's body, or makes them."""
    environment = {
        "TURNLOG_AGENTS": "sessions",
        "TURNLOG_SESSION_FROM_BODY": f"{KEY}, {USER}",
        "TURNLOG_WITHOUT_SESSION": "record",
        "TURNLOG_PUBLIC_URL": "https://turnlog.example.org/below/",
    }
    with serving(places.new("odd"), sglang.base_url, environment=environment) as made:
        yield made


@pytest.fixture(scope="module")
def keeping(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    """A server whose sessions are linear and begin a segment where a request diverges, unless they say otherwise."""
    environment = {"TURNLOG_HISTORY": "linear", "TURNLOG_ON_DIVERGENCE": "segment"}
    with serving(places.new("keeping"), sglang.base_url, environment=environment) as made:
        yield made


@pytest.fixture(params=["odd", "keeping"])
def apart(request: pytest.FixtureRequest, places: Places) -> Stand:
    """A server with whose settings each agent has a session of its own."""
    found: Stand = request.getfixturevalue(request.param)
    return found


def test_agents_that_share_a_session_work_side_by_side(apart: Stand) -> None:
    """Claude Code's main agent, two sub-agents, and a sub-agent of one of them."""
    stand, session = apart, fresh()
    main = Agent(stand, x_claude_code_session_id=session)
    one, two = (Agent(stand, **{**main.headers, "x_claude_code_agent_id": name}) for name in ("one", "two"))
    deep = Agent(stand, **{**main.headers, "x_claude_code_agent_id": "deep", "x_claude_code_parent_agent_id": "one"})
    agents = [main, one, two, deep]
    for _ in range(2):
        waits = [stand.meanwhile(agent.say, "Work", sim={"latency_s": 0.3}) for agent in agents]
        for wait in waits:
            wait.result()
    ids = [session, f"{session}:one", f"{session}:two", f"{session}:deep"]
    assert [turns(stand, name) for name in ids] == [2] * 4
    assert [config(stand, name).get("parent") for name in ids] == [None, session, session, f"{session}:one"]


@pytest.mark.parametrize(
    ("named", "parents"),
    [
        ("x-session-id", "x-parent-session-id"),
        ("x-dynamo-session-id", "x-dynamo-parent-session-id"),
        ("x-turnlog-session-id", "x-turnlog-parent-session-id"),
        ("x-multi-turn-session-id", "x-turnlog-parent-session-id"),
    ],
)
def test_a_parent_in_a_header_need_not_be_known(stand: Stand, named: str, parents: str) -> None:
    child, parent = fresh(), fresh()
    Agent(stand, **{named: child, parents: parent}).say("Hello")
    assert config(stand, child)["parent"] == parent
    assert stand.http.get(f"/sessions/{parent}").status_code == 404


def test_threads_of_codex(apart: Stand) -> None:
    stand, session = apart, fresh()
    Agent(stand, session_id=session, thread_id=session).say("Hello")
    Agent(stand, session_id=session, thread_id="t2", x_codex_parent_thread_id=session).say("Hello")
    Agent(stand, session_id=session, thread_id="t3", x_codex_parent_thread_id="t2").say("Hello")
    parents = [config(stand, name).get("parent") for name in (session, f"{session}:t2", f"{session}:t3")]
    assert parents == [None, session, f"{session}:t2"]


@pytest.mark.parametrize("agent", ["a b/c", "x" * 120])
def test_an_agent_whose_name_cannot_be_part_of_an_id_has_a_session_all_the_same(apart: Stand, agent: str) -> None:
    stand, session = apart, fresh()
    talker = Agent(stand, x_turnlog_session_id=session, x_turnlog_agent_id=agent)
    talker.say("Hello")
    talker.say("Again")
    Agent(stand, x_turnlog_session_id=session, x_turnlog_agent_id=agent + "!").say("Hello")
    listed = stand.http.get("/sessions", params={"limit": 2}).json()["sessions"]
    assert {one["session_id"].rpartition(":")[0] for one in listed} == {session}
    assert [turns(stand, one["session_id"]) for one in listed] == [1, 2]


@pytest.mark.parametrize("name", ["x-session-id", "x-parent-session-id"])
def test_a_name_that_is_no_id_is_refused_by_its_header(stand: Stand, name: str) -> None:
    refused = Agent(stand, **{"x-session-id": fresh(), name: "a/b"}).chat("Hello")
    assert error_of(refused) == (400, "invalid_request")
    assert refused.json()["error"]["message"].startswith(f"{name} must")


def test_what_cannot_be_told_apart_is_refused_with_a_word_on_what_to_send(stand: Stand) -> None:
    session = stand.talk(history="linear").id
    one, two = Agent(stand, x_session_id=session), Agent(stand, x_session_id=session)
    first = stand.meanwhile(one.say, "Work", sim={"latency_s": HOURS})
    until(lambda: stand.engine_requests(session))
    busy = two.chat("Something else")
    assert error_of(busy) == (409, "session_busy")
    assert busy.headers["x-should-retry"] == "false"
    stand.end()
    first.result()
    one.say("More")
    other = two.chat("Something else")
    assert error_of(other) == (400, "history_mismatch")
    one.say("And more")
    two.messages = one.messages[:2]
    deep = two.chat("Something else")
    assert error_of(deep) == (400, "rollback_too_deep")
    two.messages = [user("Something else"), {"role": "assistant", "content": "An answer"}]
    mismatch = two.chat("And now?", stream=True)
    assert error_of(mismatch) == (400, "history_mismatch")
    for refused in (busy, other, deep, mismatch):
        message = refused.json()["error"]["message"]
        assert "x-turnlog-agent-id" in message
        assert "x-turnlog-parent-session-id" in message
    in_path = session_of(stand, session).chat([user("Something else")])
    assert error_of(in_path) == (400, "history_mismatch")
    assert "x-turnlog-agent-id" not in in_path.text


NAMED: tuple[tuple[dict[str, Any], str | None], ...] = (
    *(({KEY: "{id}"}, "{id}"), ({"metadata": {"user_id": "{id}"}}, "{id}"), ({KEY: "a/b {id}"}, None)),
    ({"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "{id}"})}}, "{id}"),
    ({"metadata": {"user_id": json.dumps({"device_id": "{id}"})}}, None),
    ({KEY: "{id}", "metadata": {"user_id": "another"}}, "{id}"),
    *(({KEY: 7, "metadata": {"user_id": "{id}"}}, "{id}"), ({KEY: "{id}" * 5}, None)),
)


@pytest.mark.parametrize(("fields", "named"), NAMED)
def test_a_field_of_the_body_names_the_session_if_a_setting_says_so(
    stand: Stand, odd: Stand, fields: dict[str, Any], named: str | None
) -> None:
    """A name that is no id is hashed."""
    session = fresh()
    sent = json.loads(json.dumps(fields).replace("{id}", session))
    agent = Agent(odd)
    agent.say("Hello", **sent)
    agent.say("More", **sent)
    found = odd.http.get("/sessions", params={"limit": 1}).json()["sessions"][0]["session_id"]
    assert turns(odd, found) == 2
    assert re.fullmatch("[0-9a-f]{32}" if named is None else session, found)
    assert config(odd, found)["history"] == "tree"
    agent.say("And elsewhere", {"x-session-id": f"{session}-header"}, **sent)
    assert turns(odd, f"{session}-header") == 1
    assert error_of(Agent(stand).chat("Hello", **sent)) == (400, "invalid_request")


@pytest.mark.parametrize("stream", [False, True])
def test_a_final_turn_closes_its_session_after_the_reply(stand: Stand, stream: bool) -> None:
    session = fresh()
    agent = Agent(stand, x_session_id=session)
    agent.say("Hello", {"x-dynamo-session-final": "false"})
    final = {"x-dynamo-session-final": "true"}
    failed = agent.chat("Bye", final, sim={"fault": "status_500"})
    assert failed.status_code == 500
    last = agent.chat("Bye", final, stream=stream)
    assert last.status_code == 200
    assert last.text.endswith("data: [DONE]\n\n" if stream else "}")
    talk = session_of(stand, session)
    until(lambda: talk.types()[-1] == "SessionClosed")
    assert talk.events()[-1].get("reason", "deleted") == "deleted"
    assert error_of(agent.chat("More")) == (404, "session_closed")
    assert len(talk.committed()) == 2


def test_a_server_may_keep_what_diverges_in_sessions_that_do_not_say(keeping: Stand) -> None:
    said, unsaid, named = keeping.talk(on_divergence="reject"), keeping.talk(), fresh()
    agents = {
        unsaid.id: Agent(keeping, x_session_id=unsaid.id),
        named: Agent(keeping, x_session_id=named),
        f"{named}:sub": Agent(keeping, x_turnlog_session_id=named, x_turnlog_agent_id="sub"),
    }
    for session_id, agent in agents.items():
        assert [agent.chat(text).status_code for text in ("One", "Two")] == [200, 200]
        assert [row["segment"] for row in session_of(keeping, session_id).rows()] == [0, 1]
    strict = [
        Agent(keeping, x_session_id=said.id),
        Agent(keeping, x_turnlog_session_id=said.id, x_turnlog_agent_id="sub"),
    ]
    for agent in strict:
        assert agent.chat("One").status_code == 200
        assert error_of(agent.chat("Two")) == (400, "history_mismatch")


@pytest.mark.parametrize("capture", ["", "/training-token-capture"])
def test_gyms_prefix_names_the_session(stand: Stand, capture: str) -> None:
    """Whatever session the harness names itself; its agents stay its agents."""
    rollout = f"task_3-{fresh()}"
    body = {"model": "simulator", "messages": [user("Work")]}
    for agent in ({}, {"x-claude-code-agent-id": "one"}, {"x-turnlog-agent-id": "two"}):
        headers = {"x-claude-code-session-id": "another", "x-turnlog-session-id": "other", **agent}
        path = f"/ng-rollout/{rollout}{capture}/v1/chat/completions"
        response = stand.http.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
    assert [turn.get("agent_id") for turn in session_of(stand, rollout).committed()] == [None, "one", "two"]
    assert stand.http.get("/sessions/other").status_code == 404
    models = stand.http.get(f"/ng-rollout/{rollout}{capture}/v1/models")
    assert models.json() == stand.http.get("/v1/models").json()


def test_a_request_that_names_no_session_gets_one_of_its_own(odd: Stand) -> None:
    made = []
    for protocol in (*SPOKEN, "completions"):
        path = "/v1/completions" if protocol == "completions" else SPOKEN[protocol].path
        body = {"model": "simulator", "prompt": "Hello"}
        if protocol in SPOKEN:
            body = odd.known("", protocol).body([user("Hello")])
        for more in ({}, {"stream": True}):
            reply = odd.http.post(path, json={**body, **more})
            assert reply.status_code == 200, reply.text
            made.append(reply.headers[TOLD])
            assert turns(odd, made[-1]) == 1
        key = {"idempotency-key": f"once-{protocol}"}
        first, again = (odd.http.post(path, json=body, headers=key) for _ in range(2))
        assert (again.content, again.headers[TOLD]) == (first.content, first.headers[TOLD])
        assert again.headers["x-turnlog-replayed"] == "true"
        made.append(first.headers[TOLD])
        refused = odd.http.post(path, json={**body, "n": 2})
        assert (refused.status_code, turns(odd, refused.headers[TOLD])) == (400, 0)
    assert len(set(made)) == len(made)

    agent, name = Agent(odd), fresh()
    agent.say("Hello", {TOLD: name})
    for session in (name, made[0]):
        assert TOLD not in agent.chat("On", {TOLD: session}).headers
    assert turns(odd, made[0]) == 2
    url = odd.http.post("/sessions", json={"session_id": "known"}).json()["url"]
    assert url == "https://turnlog.example.org/below/sessions/known"


def test_a_rollback_is_told_in_a_stream_whose_headers_have_gone_out(tight: Stand) -> None:
    talk = tight.talk(history="linear")
    talk.say("Hello")
    talk.say("More")
    again = talk.chat(talk.messages[:3], stream=True, sim={"latency_s": 0.5})
    assert "x-turnlog-rolled-back" not in again.headers
    comments = [part for part in again.text.split("\n\n") if part.startswith(":")]
    assert (comments[0], comments[-1]) == (": keep-alive", ": x-turnlog-rolled-back: 1")
    assert assembled(again.text)["choices"][0]["finish_reason"] == "stop"


def test_an_agents_own_id_goes_with_any_session_header(apart: Stand) -> None:
    stand, session = apart, fresh()
    headers = {"session-id": session, "x-turnlog-agent-id": "reviewer"}
    Agent(stand, **headers).say("Hello")
    assert config(stand, f"{session}:reviewer")["parent"] == session
    Agent(stand, **headers | {"x-turnlog-agent-id": "tester", "x-turnlog-parent-session-id": "elsewhere"}).say("Hello")
    assert config(stand, f"{session}:tester")["parent"] == "elsewhere"


def test_a_child_takes_after_its_parent(stand: Stand) -> None:
    taken = {
        "adapter": "poet",
        "on_abort": "fail",
        "matcher": "strict",
        "rollback_window": 3,
        "on_divergence": "segment",
        "retain": "sampled",
        "on_limit": "length",
    }
    parent = stand.talk(**taken, group_id="task", history="linear")
    Agent(stand, x_turnlog_session_id=parent.id, x_turnlog_agent_id="sub").say("Hello")
    assert config(stand, f"{parent.id}:sub") == {**taken, "parent": parent.id}


def test_a_session_is_not_its_own_parent(stand: Stand) -> None:
    session = fresh()
    Agent(stand, x_session_id=session, x_parent_session_id=session).say("Hello")
    assert "parent" not in config(stand, session)


def test_the_first_session_header_counts_and_its_own_relatives(stand: Stand) -> None:
    session, other = fresh(), fresh()
    headers = {"x-session-id": session, "x-claude-code-session-id": other, "x-claude-code-agent-id": "one"}
    Agent(stand, **headers, **{"x-dynamo-parent-session-id": other}).say("Hello")
    assert "parent" not in config(stand, session)
    assert stand.http.get(f"/sessions/{other}").status_code == 404


@pytest.mark.parametrize("path", ["/ng-rollout//v1/models", "/ng-rollout/-a/v1/models", "/ng-rollout/a/health"])
def test_no_other_path_has_gyms_prefix(stand: Stand, path: str) -> None:
    assert stand.http.get(path).status_code == 404
