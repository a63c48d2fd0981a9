"""The token of a run on real servers: everything within the run, nothing outside, not even that it exists."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator

import httpx
import pytest

from integration.cli import answer, run
from integration.guarded import ADMIN, CHAT, Guarded, Team, bearer, guarded_serving
from integration.places import Places
from integration.stand import error_of, until
from ops.simulator.process import SimulatorProcess
from turnlog import Turnlog


@pytest.fixture
def teams(guarded: Guarded) -> Iterator[tuple[Team, Team]]:
    mark = uuid.uuid4().hex[:8]
    both = Team(guarded, f"ours.{mark}"), Team(guarded, f"theirs.{mark}")
    yield both
    for team in both:
        team.http.close()


def test_a_runs_token_does_everything_within_the_run(guarded: Guarded, teams: tuple[Team, Team]) -> None:
    ours, _ = teams
    made = ours.session(group_id="g")
    assert ours.chat(made).status_code == 200
    assert ours.http.put(f"/sessions/{made}/reward", json={"reward": 1.0}).status_code == 200
    assert ours.http.put(f"/sessions/{made}/annotations/note", json={"value": "seen"}).status_code == 200
    forked = ours.http.post(f"/sessions/{made}/fork", json={"turn": 1}).json()["sessions"][0]["session_id"]
    child = ours.session(parent_session_id=made)
    listed = {one["session_id"]: one["run"] for one in ours.http.get("/sessions").json()["sessions"]}
    assert listed == dict.fromkeys((made, forked, child), ours.run)
    assert ours.http.get("/sessions", params={"run": ours.run}).json()["sessions"]
    for path in ("", "/messages", "/tree", "/state", "/events", "/annotations", "/v1/models"):
        assert ours.http.get(f"/sessions/{made}{path}").status_code == 200, path
    assert ours.http.get(f"/sessions/{made}/messages").json()["reward"]["reward"] == 1.0
    assert ours.http.delete(f"/sessions/{forked}").status_code == 204
    assert ours.http.delete(f"/sessions/{made}?erase=true").status_code == 204
    assert error_of(ours.http.get(f"/sessions/{made}")) == (404, "session_closed")


@pytest.mark.threat("run's token on another run")
def test_names_in_headers_are_the_runs_own(guarded: Guarded, teams: tuple[Team, Team]) -> None:
    ours, theirs = teams
    name, body = uuid.uuid4().hex, {"model": "simulator", "messages": [{"role": "user", "content": "Hello"}]}
    by_name = {"x-session-id": name}
    made = [
        one.http.post(CHAT, json=body, headers=by_name).headers["x-turnlog-session-id"]
        for one in (ours, theirs)
        for _ in range(2)
    ]
    assert made[0] == made[1] != made[2] == made[3]
    for team, session_id, other in ((ours, made[0], made[2]), (theirs, made[2], made[0])):
        [listed] = team.http.get("/sessions").json()["sessions"]
        assert (listed["session_id"], listed["run"], listed["turns"]) == (session_id, team.run, 2)
        assert team.http.get(f"/sessions/{name}").json()["session"]["session_id"] == session_id
        assert error_of(team.http.get(f"/sessions/{other}")) == (404, "session_not_found")
        foreign = {"x-session-id": other}
        assert error_of(team.http.post(CHAT, json=body, headers=foreign)) == (409, "id_unavailable")
        replies = [team.http.get("/v1/responses/resp_1", headers={"x-session-id": one}) for one in (other, "absent")]
        assert replies[0].text.replace(other, "absent") == replies[1].text
        elsewhere = {**by_name, "x-turnlog-run": "default"}
        assert error_of(team.http.post(CHAT, json=body, headers=elsewhere)) == (403, "forbidden")
    finished = theirs.http.post("/finish_session", params={"session_id": made[0]})
    assert finished.json() == {"session_id": None, "name": made[0], "generation": None}
    assert theirs.http.post("/finish_session", params={"session_id": name}).json()["session_id"] == made[2]
    statuses = [guarded.admin.get(f"/sessions/{one}").status_code for one in (made[0], made[2])]
    assert statuses == [200, 404]


@pytest.mark.threat("run's token on another run")
def test_another_run_looks_like_none(guarded: Guarded, teams: tuple[Team, Team]) -> None:
    ours, theirs = teams
    secret, mine = uuid.uuid4().hex, ours.session()
    taken = theirs.session(metadata={"about": secret})
    assert theirs.chat(taken, secret).status_code == 200
    before = guarded.events(taken)
    closed = theirs.session()
    assert theirs.http.delete(f"/sessions/{closed}").status_code == 204
    for method, rest in (
        *(("GET", rest) for rest in ("", "/messages", "/events", "/events?follow=true", "?generation=1")),
        *(("GET", rest) for rest in ("?generation=2", "/nothing", "/turns/1/routed_experts", "/v1/responses/resp_1")),
        *(("HEAD", ""), ("PUT", "/reward"), ("DELETE", ""), ("DELETE", "?erase=true"), ("POST", "/fork")),
        *(("POST", rest) for rest in (CHAT, "/v1/messages", "/v1/responses", "/samples", "/finish")),
    ):
        same = {"x-request-id": "the-same"}
        replies = [
            ours.http.request(method, f"/sessions/{name}{rest}", json={}, headers=same)
            for name in (taken, closed, "absent")
        ]
        seen = {reply.text.replace(name, "") for reply, name in zip(replies, (taken, closed, "absent"), strict=True)}
        assert len(seen) == 1, (method, rest)
        assert {reply.status_code for reply in replies} == {404}, (method, rest)
    for body in ({"session_id": taken}, {"session_id": closed}, {"parent_session_id": taken}):
        assert error_of(ours.http.post("/sessions", json=body)) == (409, "id_unavailable")
        assert theirs.run not in ours.http.post("/sessions", json=body).text
    orphan = theirs.session(parent_session_id=f"{taken}-root")
    assert error_of(ours.http.post("/sessions", json={"session_id": f"{taken}-root"})) == (409, "id_unavailable")
    assert ours.http.post("/sessions", json={"session_id": mine}).json()["session_id"] == mine
    assert error_of(ours.http.post("/sessions", json={"session_id": mine, "group_id": "x"})) == (409, "session_exists")
    for query in (f"run={theirs.run}", "run=*", f"run={ours.run}&run={theirs.run}", f"ru%6e={theirs.run}", "run="):
        assert error_of(ours.http.get(f"/sessions?{query}")) == (403, "forbidden"), query
    named = [{"run": theirs.run}, {"run": "default"}]
    assert [error_of(ours.http.post("/sessions", json=body)) for body in named] == [(403, "forbidden")] * 2
    elsewhere = {"x-turnlog-run": theirs.run}
    assert error_of(ours.http.get("/sessions", headers=elsewhere)) == (403, "forbidden")
    assert {one["session_id"] for one in ours.http.get("/sessions").json()["sessions"]} == {mine}
    assert {one["session_id"] for one in theirs.http.get("/sessions").json()["sessions"]} == {taken, closed, orphan}
    assert guarded.events(taken) == before


def test_a_runs_token_asks_of_an_engine_what_a_sessions_does(guarded: Guarded, teams: tuple[Team, Team]) -> None:
    ours, theirs = teams
    mine, other = ours.session(), theirs.session()
    for fields in (
        {"nvext": {"session_control": {"session_id": other, "action": "bind"}}},
        {"session_params": {"id": other}},
        {"custom_logit_processor": "code"},
        {"chat_template": "{{ messages }}"},
    ):
        assert error_of(ours.chat(mine, **fields)) == (403, "forbidden"), fields
    pinned = {"params": {"custom_logit_processor": "code"}}
    assert error_of(ours.http.post("/sessions", json=pinned)) == (403, "forbidden")
    assert ours.chat(mine, nvext={"session_control": {"session_id": mine, "action": "bind"}}).status_code == 200


@pytest.mark.threat("run's token on another run")
def test_a_browser_signs_in_with_a_runs_token(guarded: Guarded, teams: tuple[Team, Team]) -> None:
    """It reads what the token opens, writes a note of the run's, and ends with the token."""
    ours, theirs = teams
    mine, other = (team.session(group_id="g") for team in teams)
    with httpx.Client(base_url=guarded.stand.server.base_url, timeout=20) as browser:
        reply = browser.post("/ui/sign-in", json={"token": ours.token})
        assert (reply.status_code, ours.token in reply.headers["set-cookie"]) == (200, False)
        assert browser.get("/ui/api/me").json()["run"] == ours.run
        assert browser.get("/ui/api/sessions").json()["total"] == 1
        assert browser.get("/ui/api/overview").json()["sessions"]["open"] == 1
        assert browser.get("/ui/api/exports").json()["scanned"] == 1
        assert browser.get("/ui/api/summaries", params={"session_id": [mine, other]}).json().keys() == {mine}
        assert browser.get(f"/ui/api/runs/{ours.run}").json()["run"]["sessions"]["open"] == 1
        assert error_of(browser.get(f"/ui/api/runs/{theirs.run}")) == (404, "not_found")
        named = {"rollout": [mine, other, f"{other}@0"]}
        hidden = [one.get("error") for one in browser.get("/ui/api/rollouts", params=named).json()["columns"]]
        assert hidden == [None, *[f"session {other} does not exist"] * 2]
        for name, status in ((mine, 200), (other, 404)):
            assert browser.get("/ui/api/rollouts/texts", params={"step": f"{name}/0"}).status_code == status
        for rest in ("", "/actions", "/find?text=x", "/conversation", "/tokens", "/turns"):
            replies = [browser.get(f"/ui/api/sessions/{name}{rest}") for name in (other, "absent")]
            assert [error_of(one) for one in replies] == [(404, "session_not_found")] * 2, rest
            assert browser.get(f"/ui/api/sessions/{mine}{rest}").status_code == 200
        for run in ("*", ours.run):
            assert guarded.admin.post("/checkpoints", json={"name": ours.run, "run": run}).status_code == 200
        shown = browser.get(f"/ui/api/sessions/{mine}").json()["checkpoints"]
        assert [one["run"] for one in shown] == [ours.run], "the operator's of the whole store is hidden"
        for path in ("overview", "sessions", "exports", "live"):
            assert error_of(browser.get(f"/ui/api/{path}?run={theirs.run}")) == (403, "forbidden"), path
        assert ours.chat(mine).status_code == theirs.chat(other).status_code == 200
        with browser.stream("GET", "/ui/api/live") as stream:
            lines = stream.iter_lines()
            next(line for line in lines if line.startswith("event: hello"))
            assert [team.http.delete(f"/sessions/{name}").status_code for team, name in ((theirs, other), (ours, mine))]
            rows = next(line for line in lines if '"rows"' in line)
            assert (mine in rows, other in rows) == (True, False)
        marks = {"x-turnlog-page": "1", "sec-fetch-site": "same-origin"}
        statuses = [
            browser.put(f"/sessions/{name}/annotations/note", json={"value": "seen"}, headers=marks).status_code
            for name in (mine, other)
        ]
        assert statuses == [200, 404]
        assert error_of(browser.post("/sessions", json={})) == (401, "unauthorized")
        assert error_of(browser.get("/export/groups?consumer=a")) == (401, "unauthorized")
        assert guarded.admin.delete(f"/runs/{ours.run}/token").status_code == 204
        until(lambda: browser.get("/ui/api/me").status_code == 401)
        assert error_of(browser.post("/ui/sign-in", json={"token": ours.token})) == (401, "unauthorized")


@pytest.mark.threat("leaked token stays valid")
def test_a_token_ends_with_the_next_one(guarded: Guarded, teams: tuple[Team, Team]) -> None:
    ours, theirs = teams
    assert error_of(ours.http.post(f"/runs/{ours.run}/token")) == (403, "forbidden")
    later = guarded.admin.post(f"/runs/{ours.run}/token").json()
    assert later["run"] == ours.run
    assert later["token"] != ours.token
    statuses = [
        guarded.stranger.get("/sessions", headers=bearer(token)).status_code
        for token in (ours.token, later["token"], theirs.token, f"{later['token'][:-1]}_", "tlr.a.1.b", "tlr..")
    ]
    assert statuses == [401, 200, 200, 401, 401, 401]
    assert guarded.admin.delete(f"/runs/{ours.run}/token").status_code == 204
    assert error_of(guarded.stranger.get("/sessions", headers=bearer(later["token"]))) == (401, "unauthorized")
    anew = guarded.admin.post(f"/runs/{ours.run}/token").json()["token"]
    assert anew not in (ours.token, later["token"])
    assert guarded.admin.post("/runs/a%20b/token").status_code == 400


def test_all_processes_and_later_ones_know_which_token_is_valid(places: Places, sglang: SimulatorProcess) -> None:
    place = places.new("run-tokens")

    def status(of: Guarded, token: str) -> int:
        return of.stranger.get("/sessions", headers=bearer(token)).status_code

    with place.database() as url, contextlib.ExitStack() as stack:
        environment = {"TURNLOG_DATABASE_URL": url}
        with guarded_serving(place, sglang.base_url, environment=environment) as guarded:
            [first, second] = (guarded.admin.post("/runs/kept/token").json()["token"] for _ in range(2))
        guarded = stack.enter_context(guarded_serving(place, sglang.base_url, environment=environment))
        assert [status(guarded, token) for token in (first, second)] == [401, 200]
        other = guarded
        if places.postgres is not None:  # SQLite's file has one process.
            elsewhere = places.new("run-tokens")
            other = stack.enter_context(guarded_serving(elsewhere, sglang.base_url, environment=environment))
            assert status(other, second) == 200
        third = guarded.admin.post("/runs/kept/token").json()["token"]
        give_up_at = time.monotonic() + 20
        while status(other, second) != 401:
            assert time.monotonic() < give_up_at
        assert status(other, third) == 200


def test_the_client_and_the_command_line_make_and_end_a_runs_token(
    guarded: Guarded, clean_environment: Callable[..., None]
) -> None:
    address = guarded.stand.server.base_url
    clean_environment(URL=address, ADMIN_TOKEN=ADMIN)

    def status(token: str) -> int:
        return guarded.stranger.get("/sessions", headers=bearer(token)).status_code

    made = run("run-token", "by-hand").stdout.strip()
    assert status(made) == 200
    assert answer("run-token", "by-hand", "--end") == {"run": "by-hand", "token": None}
    assert status(made) == 401
    with Turnlog(address, token=ADMIN) as client:
        token = client.run_token("by-hand")
        with Turnlog(address, token=token) as team:
            session = team.create_session(group_id="g")
            assert session.set_reward(1.0) > 0
            assert [one["run"] for one in team.sessions()] == ["by-hand"]
        client.end_run_token("by-hand")
    assert status(token) == 401


@pytest.mark.threat("run's token on another run")
def test_a_runs_token_adds_no_engine_that_others_know_and_sends_the_key_nowhere(
    guarded: Guarded, teams: tuple[Team, Team]
) -> None:
    ours, theirs = teams
    own, foreign = (f"http://{one.run.replace('.', '-')}.engines.invalid" for one in (ours, theirs))

    def added(team: Team, url: str) -> tuple[int, str | None]:
        response = team.http.post("/engines", json={"url": url})
        return (response.status_code, response.json().get("run")) if response.is_success else error_of(response)

    assert added(theirs, foreign) == (200, theirs.run)
    assert added(ours, own) == added(ours, own) == (200, ours.run)
    assert added(ours, foreign) == added(ours, str(guarded.stand.sim.base_url)) == (409, "id_unavailable")
    assert theirs.http.delete("/engines", params={"url": foreign}).status_code == 204
    assert added(ours, foreign) == (409, "id_unavailable"), "it is not told whether others have it still"
    assert added(ours, "http://127.0.0.1:9") == (403, "forbidden")
    assert ours.http.delete("/engines", params={"url": own}).status_code == 204
