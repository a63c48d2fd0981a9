"""Tokens on a real server: whose routes are whose, and that nobody can tell another's session from none."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from app.api.openapi import document
from app.main import create_app
from app.protocols import registry
from app.settings import Settings
from integration.guarded import ADMIN, ADMIN_BEFORE, CHAT, Client, Guarded, Team, bearer, guarded_serving, raw
from integration.places import Places
from integration.stand import error_of, user
from ops.server import ROOT
from ops.simulator.process import SimulatorProcess

GENERATING = [*registry.ROUTES]


def every_route() -> list[tuple[str, str]]:
    """Method and path of each route that the application has, with `{name}` for what varies."""
    app = create_app(Settings(workers=1))
    paths = document(app.table, app.release)["paths"]
    return sorted({(method.upper(), path) for path, methods in paths.items() for method in methods} | PAGE)


PAGE = {(method, path) for method in ("GET", "HEAD") for path in ("/ui", "/ui/", "/ui/static/{name}")}
ROUTES = every_route()
OPEN = {
    *(("GET", path) for path in ("/", "/docs", "/health", "/ready")),
    *(("POST", path) for path in ("/ui/sign-in", "/ui/sign-out")),
    *PAGE,
}
MODEL = "/v1/models/{model_id}"
STORED = "/v1/responses/{response_id}"
LIVE = "/ui/api/live"
"""It does not end; what of it a run's token opens is in test_run_tokens."""
HEADER_ROUTES = {
    *(("GET", path) for path in ("/v1/models", MODEL, STORED, f"{STORED}/input_items")),
    *(("POST", path) for path in (*GENERATING, "/v1/messages/count_tokens")),
    ("PUT", "/generate"),
}


def documented() -> dict[tuple[str, str], tuple[str, str]]:
    """What docs/security.md says of each route with a session's token, and with a run's: its rule, and its table."""
    table = (ROOT / "docs" / "security.md").read_text().partition("| route | a session's token | a run's token |")[2]
    of_a_session = {place for place in ROUTES if place[1].startswith("/sessions/{")} | HEADER_ROUTES
    found = dict.fromkeys(of_a_session, ("yes", "its run"))
    for line in table.partition("\n\n")[0].splitlines()[2:]:
        routes, session, run = line.strip("| ").split(" | ")
        method, *paths = re.findall("`([^`]+)`", routes)
        answers = session.strip("`"), run
        found |= {(method, path.replace("…", "/sessions/{session_id}")): answers for path in paths}
    return found


TABLE = documented()
DOCUMENTED = {
    place: of_session
    for place, (of_session, _) in TABLE.items()
    if of_session != "no" or place[1].startswith("/sessions/{")
}


def filled(path: str, session_id: str) -> str:
    path = path.replace("{session_id}", session_id).replace("{turn}", "1").replace("{fence}", "1")
    return re.sub(r"\{[^}]*\}", "routed_experts", path)


def test_every_route_is_known() -> None:
    """That the lists above are about real routes."""
    assert len(ROUTES) > 25
    assert {*OPEN, *HEADER_ROUTES} <= set(ROUTES)
    of_sessions = {(method, path) for method, path in ROUTES if path.startswith("/sessions/")}
    assert set(DOCUMENTED) == of_sessions | HEADER_ROUTES
    assert set(TABLE) <= set(ROUTES)


def test_the_document_says_which_routes_a_runs_token_opens() -> None:
    app = create_app(Settings(workers=1))
    said = {None: "no", "any": "yes"}
    for route in app.table.routes:
        for method in route.methods if route.summary else ():
            is_view = route.path.startswith("/ui/api/")  # They are the page's, and may change with it.
            if method != "HEAD" and not is_view and (method, route.documented_path) not in OPEN:
                default = "its run" if route.tag == "As an engine" and route.path != "/ping" else "no"
                _, of_run = TABLE.get((method, route.documented_path), ("no", default))
                assert of_run == said.get(route.limit, "its run"), (method, route.path)
    # What says that it is limited, and lacks the place for it, is closed; `/fleet` is the same of all runs.
    assert {route.documented_path for route in app.table.routes if route.of_run not in (route.limit, "path")} == set()


@pytest.mark.threat("missing token")
def test_without_a_token_nothing_but_health_and_the_pages_files_is_served(guarded: Guarded) -> None:
    for method, path in ROUTES:
        for headers in ({}, bearer("unknown"), bearer(f"tls.a.{'A' * 43}")):
            reply = guarded.stranger.request(method, filled(path, "any"), headers=headers)
            if (method, path) in OPEN:
                assert reply.status_code not in (401, 403), path
            else:
                assert reply.status_code == 401, path
                assert reply.headers["www-authenticate"] == "Bearer"
                assert method == "HEAD" or error_of(reply) == (401, "unauthorized")


@pytest.mark.threat("session token on an admin route")
def test_a_sessions_token_opens_its_own_routes_and_no_other(guarded: Guarded) -> None:
    mine, other = guarded.client(), guarded.client()
    before = guarded.events(other.id)
    for method, path in ROUTES:
        if (method, path) in OPEN:
            continue
        reply = mine.ask(method, filled(path, other.id))
        if (method, path) in HEADER_ROUTES:
            # In the order of paths the session is closed before these come, and there is no such model.
            code = "not_found" if path == MODEL else "session_closed"
            assert reply.status_code in (200, 400) or error_of(reply) == (404, code), path
        elif path.startswith("/sessions/"):
            assert error_of(reply) == (404, "session_not_found"), path
            own = mine.ask(method, filled(path, mine.id))
            if DOCUMENTED[method, path] in ("no", "TURNLOG_SESSION_REWARDS"):
                assert error_of(own) == (403, "forbidden"), path
                continue
            assert own.status_code in (200, 204, 400, 404), path
            assert own.status_code != 404 or own.json()["error"]["code"] in ("not_found", "session_closed")
        else:
            assert error_of(reply) == (403, "forbidden"), path
    assert guarded.events(other.id) == before


JUDGING: list[tuple[str, str, dict[str, Any]]] = [
    *(("PUT", f"/reward{end}", {"json": {"reward": 1.0}}) for end in ("", "/", "?turn=1")),
    *(("PUT", "/reward", {"json": body}) for body in ({"reward": 1.0, "turn": 1}, {}, {"reward": "much"})),
    *(("POST", f"/samples{end}", {"json": {"reward": 0}}) for end in ("", "?reward=null")),
    *(
        ("DELETE", f"?{query}", {})
        for query in ("erase=true", "erase=1", "erase=on", "erase=false&erase=yes", "eras%65=t")
    ),
    *(("PUT", f"{of}/annotations/reward", {"json": {"value": 1.0}}) for of in ("", "/turns/1")),
    ("POST", "/fork", {"json": {"turn": 1}}),
    ("POST", "/close", {"json": {"failed": {"kind": "sandbox"}}}),
]


@pytest.mark.threat("the judged agent sets its reward")
@pytest.mark.parametrize("has_closed", [False, True])
def test_a_sessions_token_sets_no_reward_and_erases_nothing(guarded: Guarded, has_closed: bool) -> None:
    mine = guarded.client()
    assert mine.chat_at(mine.chat_path).status_code == 200
    if has_closed:
        assert mine.ask("DELETE", mine.path, params={"erase": "false"}).status_code == 204
    else:
        assert mine.ask("POST", f"{mine.path}/samples", json={"reward": None}).status_code == 200
    before = guarded.events(mine.id)
    for method, rest, more in JUDGING:
        assert error_of(mine.ask(method, mine.path + rest, **more)) == (403, "forbidden"), rest
    assert guarded.events(mine.id) == before
    assert guarded.admin.put(f"{mine.path}/reward", json={"reward": 0.5}).status_code == 200
    assert guarded.admin.delete(f"{mine.path}?erase=true").status_code == 204


def test_an_operator_may_let_a_sessions_token_judge(lenient: Guarded) -> None:
    mine = lenient.client()
    assert mine.chat_at(mine.chat_path).status_code == 200
    assert mine.ask("PUT", f"{mine.path}/reward", json={"reward": 0.5}).status_code == 200
    assert mine.ask("POST", f"{mine.path}/samples", json={"reward": 1.0}).status_code == 200
    assert lenient.admin.get(mine.path).json()["metadata"]["reward"] == 1.0
    assert error_of(mine.ask("PUT", f"{mine.path}/annotations/reward", json={"value": 1})) == (403, "forbidden")
    assert mine.ask("POST", f"{mine.path}/close", json={"failed": {"kind": "agent"}}).status_code == 204
    assert mine.ask("DELETE", f"{mine.path}?erase=true").status_code == 204


def test_a_token_comes_with_its_session_each_time_and_each_fork_has_its_own(guarded: Guarded) -> None:
    name = uuid.uuid4().hex
    first, again = (guarded.admin.post("/sessions", json={"session_id": name}).json() for _ in range(2))
    assert first == again
    assert first["token"].startswith(f"tls.{name}.")
    assert first["token"].rpartition(".")[2] not in guarded.admin.get("/sessions").text + guarded.events(name)
    source = guarded.client()
    assert source.chat_at(source.chat_path).status_code == 200
    for one in guarded.admin.post(f"{source.path}/fork", json={"turn": 1, "count": 2}).json()["sessions"]:
        assert one["token"].startswith(f"tls.{one['session_id']}.")
        ask = [(one["session_id"], 200), (source.id, 404)]
        for session_id, status in ask:
            reply = guarded.stranger.get(f"/sessions/{session_id}", headers=bearer(one["token"]))
            assert reply.status_code == status


SUBROUTES = [
    *(("GET", rest) for rest in ("", "/events", "/v1/models", "/turns/1/routed_experts", "/rejected/1")),
    *(("GET", "/events?follow=true"), ("PUT", "/reward"), ("DELETE", ""), ("DELETE", "?erase=true")),
    *(("POST", rest) for rest in (CHAT, "/v1/completions", "/samples")),
]


@pytest.mark.threat("probing for sessions")
def test_another_session_looks_like_none_whatever_became_of_it(guarded: Guarded) -> None:
    mine, mark = guarded.client(), uuid.uuid4().hex[:8]
    names = [f"{kind}-{mark}" for kind in ("open", "shut", "gone", "none")]
    for name in names[:3]:
        guarded.client(session_id=name).chat_at(f"/sessions/{name}{CHAT}")
    assert guarded.admin.delete(f"/sessions/{names[1]}").status_code == 204
    assert guarded.admin.delete(f"/sessions/{names[2]}?erase=true").status_code == 204

    def as_none(ask: Callable[[str], httpx.Response]) -> None:
        [(status, _, _)] = {appearance(ask(name), name) for name in names}
        assert status == 404

    for method, rest in SUBROUTES:
        as_none(lambda name, method=method, rest=rest: mine.ask(method, f"/sessions/{name}{rest}", json={}))  # type: ignore[misc]
    for header in ("x-session-id", "x-turnlog-session-id"):
        as_none(lambda name, header=header: mine.chat_at(CHAT, headers={header: name}))  # type: ignore[misc]
    as_none(lambda name: mine.chat_at(f"/ng-rollout/{name}{CHAT}"))
    assert mine.chat_at(f"/ng-rollout/{mine.id}{CHAT}").status_code == 200
    assert error_of(guarded.admin.get(f"/sessions/{names[3]}")) == (404, "session_not_found")


def appearance(reply: httpx.Response, name: str) -> tuple[int, tuple[tuple[str, str], ...], str]:
    headers = tuple((key, value) for key, value in reply.headers.multi_items() if key not in ("date", "x-request-id"))
    return reply.status_code, headers, reply.text.replace(name, "NAME")


SPELLINGS = r"""
    /sessions/{a}/../{b} /sessions/{a}/%2e%2e/{b} /sessions/{a}%2f..%2f{b} /sessions/{a}%2F%2E%2E%2F{b} //sessions/{b}
    /sessions//{b} /./sessions/{b} /sessions/{b}/ /sessions/{b}// /%2fsessions/{b} /sessions/{b}%00 /sessions/{b}%0a
    /sessions/{b};{a} /sessions/{b}%3f{a} /sessions/{b}#{a} /sessions/{a}/..%2f..%2fsessions/{b} /%73essions/{b}
    http://127.0.0.1/sessions/{b} /SESSIONS/{b} /sessions/{a}\..\{b} /sessions/{a}%5c..%5c{b} /ui/../sessions/{b}
    /sessions/%2e%2e/sessions/{b} /ui/static/../../sessions/{b} /ui/static/%2e%2e/%2e%2e/sessions/{b}
    /health/../sessions/{b} /sessions/{b}%2fevents /sessions/{a}/v1/../../{b} /groups/../sessions/{b}
    /v1/models/../../sessions/{b}
"""


@pytest.mark.threat("path confusion between guard and router")
def test_no_spelling_of_a_path_leads_to_another_session(guarded: Guarded) -> None:
    mine, other = guarded.client(), guarded.client()
    secret, port = uuid.uuid4().hex, guarded.stand.server.port
    assert other.chat_at(other.chat_path, secret).status_code == 200
    before = guarded.events(other.id)
    host, token = "Host: turnlog", f"Authorization: Bearer {mine.token}"
    for path in SPELLINGS.format(a=mine.id, b=other.id).split():
        for method in ("GET", "DELETE", "HEAD"):
            for rest in ("", "/events", "/v1/models"):
                status, came = raw(port, f"{method} {path}{rest} HTTP/1.1", host, token)
                assert 300 <= status < 500, (method, path, rest, came)
                assert secret.encode() not in came
        status, came = raw(port, f"POST {path}{CHAT} HTTP/1.1", host, token, "Content-Length: 2", body=b"{}")
        assert 400 <= status < 500, (path, came)
        status, _ = raw(port, f"GET {path} HTTP/1.1", host)
        assert status in (400, 401, 404) or path.startswith("/ui/static"), path
    assert guarded.events(other.id) == before


FORMS = r"""
    {p} {p}/ /{p} {p}// {p}? {p}?run={run} {p}?run=* {p}?run=default {p}?ru%6e={run} {p}?generation=1 {p}?erase=true
    {p}?session_id={b} {p}?group_id={b} {p}?name={b} {p}?run={run}&run={own} {p}?explain=true&records=new {p};{a}
    {p}%00 {p}%0a {p}%2f {p}%3frun={run} /.{p} /%2e{p} /sessions/{a}/..{p} /sessions/{a}/%2e%2e{q} /health/..{p}
    /sessions/{a}%2f..%2f..{p} /ui/static/..{p} {upper} {coded} /v1/models/..{p} {p}?follow=false {p}?q={b}
    {p}?prefix={b} /ng-rollout/{b}{p} /runs/{run}{p} /sessions/{b}{p} /sessions/{a}{p} http://127.0.0.1{p}
"""
HEADS = ("", "x-turnlog-run: {run}", "x-session-id: {b}", "x-turnlog-session-id: {b}")
BODIES = ("{{}}", '{{"session_id": "{b}"}}', '{{"run": "{run}"}}', '{{"parent_session_id": "{b}"}}')


def forms(path: str, **names: str) -> list[str]:
    p = filled(path.replace("{run}", names["run"]), names["b"])
    coded = "".join(f"%{ord(one):02x}" if at == 1 else one for at, one in enumerate(p))
    return list(
        dict.fromkeys(FORMS.format(p=p, q=p.replace("/", "%2f"), upper=p.upper(), coded=coded, **names).split())
    )


def attempts(guarded: Guarded, every: int) -> int:
    """Ask with the token of one run for what is another's, by each `every`th form of each route; how often."""
    mark, secret = uuid.uuid4().hex[:8], uuid.uuid4().hex
    ours, theirs = Team(guarded, f"ours-{mark}"), Team(guarded, f"theirs-{mark}")
    own, other = ours.session(), theirs.session(group_id=f"g{secret}", metadata={"about": secret})
    assert theirs.chat(other, secret).status_code == 200
    assert theirs.http.put(f"/sessions/{other}/annotations/note", json={"value": secret}).status_code == 200
    before, names = guarded.events(other), {"a": own, "b": other, "run": theirs.run, "own": ours.run}
    lines = "Host: turnlog", f"Authorization: Bearer {ours.token}"
    asked = [
        (method, form, head.format(**names), content.format(**names))
        for method, path in ROUTES
        for form in forms(path, **names)
        for head, content in zip(HEADS, BODIES, strict=True)
        if (method, path) not in OPEN and path != LIVE
    ][::every]

    def ask(one: tuple[str, str, str, str]) -> None:
        method, form, head, content = one
        sent = [head] * bool(head) + [f"Content-Length: {len(content)}"]
        status, came = raw(guarded.stand.server.port, f"{method} {form} HTTP/1.1", *lines, *sent, body=content.encode())
        assert status not in (0, 500), (one, came)
        assert secret.encode() not in came, (one, came)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, asked))
    assert guarded.events(other) == before
    listed = {one["session_id"] for one in theirs.http.get("/sessions").json()["sessions"]}
    assert listed == {other}
    for team in (ours, theirs):
        team.http.close()
    return len(asked)


@pytest.mark.threat("run's token on another run")
def test_no_route_and_no_spelling_gives_a_runs_token_another_run(guarded: Guarded) -> None:
    assert attempts(guarded, 31) > 400


@pytest.mark.long
@pytest.mark.threat("run's token on another run")
def test_no_request_of_thousands_gives_a_runs_token_another_run(guarded: Guarded) -> None:
    count = attempts(guarded, 1)
    print(f"{count} requests with a run's token, foreign content 0")
    assert count > 8_000


@pytest.mark.threat("session token on another session")
def test_a_session_in_a_header_must_be_the_tokens_own(guarded: Guarded) -> None:
    mine, other = guarded.client(), guarded.client()
    before = guarded.events(other.id)
    assert mine.chat_at(CHAT, headers={"x-session-id": mine.id}).status_code == 200
    assert error_of(mine.chat_at(CHAT, headers={"x-session-id": other.id})) == (404, "session_not_found")
    assert error_of(mine.chat_at(CHAT, headers={"x-session-id": "never-seen"})) == (404, "session_not_found")
    assert error_of(guarded.admin.get("/sessions/never-seen/events")) == (404, "session_not_found")
    named = {"nvext": {"session_control": {"session_id": other.id, "action": "bind"}}}
    assert error_of(mine.chat_at(CHAT, **named)) == (404, "session_not_found")
    parent = {"x-session-id": mine.id, "x-parent-session-id": other.id}
    assert error_of(mine.chat_at(CHAT, headers=parent)) == (404, "session_not_found")
    assert guarded.events(other.id) == before


def test_a_token_alone_names_its_session(guarded: Guarded) -> None:
    """For a harness that has nothing but its API key, which Anthropic's SDKs send as `x-api-key`."""
    mine = guarded.client()
    assert mine.chat_at(CHAT).headers["x-turnlog-turn"] == "1"
    key = {"x-api-key": mine.token, "x-turnlog-agent-id": "sub"}
    sent = guarded.stranger.post(CHAT, json=body(), headers=key)
    assert sent.headers["x-turnlog-turn"] == "2"
    made_up = {**key, "x-claude-code-session-id": "0b9c", "x-claude-code-agent-id": "reviewer"}
    del made_up["x-turnlog-agent-id"]
    assert guarded.stranger.post(CHAT, json=body(), headers=made_up).headers["x-turnlog-turn"] == "3"
    branches = [(one["branch"], one["agent_id"]) for one in mine.ask("GET", f"{mine.path}/tree").json()["turns"]]
    assert branches == [(0, None), (1, "sub"), (2, "reviewer")]
    assert error_of(guarded.admin.post(CHAT, json=body())) == (400, "invalid_request")


@pytest.mark.threat("session token on another session")
def test_a_session_that_only_has_the_name_of_an_agent_is_another(guarded: Guarded) -> None:
    mine = guarded.client()
    guarded.client(session_id=f"{mine.id}:theirs")
    guarded.client(session_id=f"{mine.id}:elsewhere", parent_session_id="another")
    for name in ("theirs", "elsewhere"):
        reply = mine.chat_at(CHAT, headers={"x-session-id": mine.id, "x-turnlog-agent-id": name})
        assert error_of(reply) == (404, "session_not_found")
        assert error_of(mine.chat_at(CHAT, headers={"x-session-id": f"{mine.id}:{name}"})) == (404, "session_not_found")
    assert error_of(mine.ask("GET", f"/sessions/{mine.id}:theirs")) == (404, "session_not_found")
    guarded.client(session_id=f"{mine.id}:given", parent_session_id=mine.id)
    assert mine.chat_at(CHAT, headers={"x-session-id": f"{mine.id}:given"}).status_code == 200


@pytest.mark.threat("session token steers another session's engine")
@pytest.mark.parametrize("action", ["open", "bind", "close", None])
def test_session_control_is_for_the_own_session(guarded: Guarded, action: str | None) -> None:
    mine, other = guarded.client(), guarded.client()
    bound = {"nvext": {"session_control": {"session_id": other.id, "action": "bind"}}}
    assert other.chat_at(other.chat_path, **bound).status_code == 200
    wish = {"session_id": other.id} if action is None else {"session_id": other.id, "action": action}
    refused = mine.chat_at(mine.chat_path, nvext={"session_control": wish})
    assert error_of(refused) == (403, "forbidden")
    assert "TurnOpened" not in guarded.events(mine.id)
    own = {"session_control": {"session_id": mine.id, "action": "bind"}}
    assert mine.chat_at(mine.chat_path, nvext=own).status_code == 200
    assert guarded.admin.post(mine.chat_path, json=body(nvext={"session_control": wish})).status_code == 200


@pytest.mark.threat("session token steers another session's engine")
@pytest.mark.threat("session token sets operator-only fields")
@pytest.mark.parametrize(
    "fields",
    [
        *({"session_params": {"id": "another"}}, {"session_params": {}}, {"session_id": "another"}),
        {"bootstrap_host": "10.0.0.1", "bootstrap_port": 1},
        *({"kv_transfer_params": {"remote_host": "10.0.0.1"}}, {"custom_logit_processor": "code"}),
        *({"chat_template": "{{ messages }}"}, {"extra_args": {"a": 1}}, {"logits_processors": ["module.function"]}),
        *({"priority": -1}, {"prompt_embeds": "AAAA"}, {"vllm_xargs": {"a": 1}}),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_only_an_operator_decides_is_for_the_admin(
    guarded: Guarded, lenient: Guarded, fields: dict[str, Any]
) -> None:
    """What reaches beyond the session, and what the engine does for all; an operator may allow a field."""
    mine, allowed, [name, *_] = guarded.client(), lenient.client(), fields
    for path, headers in ((mine.chat_path, {}), (CHAT, {"x-session-id": mine.id})):
        refused = mine.chat_at(path, headers=headers, **fields)
        assert error_of(refused) == (403, "forbidden")
        assert name in refused.json()["error"]["message"]
    assert guarded.stand.engine_requests(mine.id) == []
    assert mine.chat_at(mine.chat_path, **{name: mine.id if name == "session_id" else None}).status_code == 200
    assert guarded.admin.post(mine.chat_path, json=body(**fields)).status_code == 200
    status = 200 if name in ("priority", "extra_args") else 403
    assert allowed.chat_at(allowed.chat_path, **fields).status_code == status


@pytest.fixture(scope="module")
def lenient(sglang: SimulatorProcess, places: Places) -> Iterator[Guarded]:
    agents = {"TURNLOG_AGENTS": "sessions", "TURNLOG_MAX_AGENT_SESSIONS": "2"}
    settings = {"TURNLOG_SESSION_PARAMS": "priority, extra_args", "TURNLOG_SESSION_REWARDS": "allow", **agents}
    with guarded_serving(places.new("lenient"), sglang.base_url, environment=settings) as made:
        yield made


@pytest.mark.threat("session token creates unlimited sessions")
def test_a_token_makes_so_many_agents_sessions_and_no_more(lenient: Guarded) -> None:
    mine, long = lenient.client(), lenient.client(session_id=f"{uuid.uuid4().hex}{'x' * 90}")
    for client in (mine, long):

        def ask(agent: str, client: Client = client) -> httpx.Response:
            return client.chat_at(CHAT, headers={"x-session-id": client.id, "x-turnlog-agent-id": agent})

        assert [ask(agent).status_code for agent in ("a", "an agent of another name", "a")] == [200, 200, 200]
        refused = ask("c")
        assert error_of(refused) == (409, "too_many_sessions")
        assert refused.headers["x-should-retry"] == "false"
        assert client.chat_at(client.chat_path).status_code == 200
    assert error_of(mine.chat_at(CHAT, headers={"x-session-id": f"{mine.id}:d"})) == (409, "too_many_sessions")
    assert lenient.admin.get(f"/sessions/{mine.id}:d").status_code == 404
    by_admin = {"x-session-id": mine.id, "x-turnlog-agent-id": "c"}
    assert lenient.admin.post(CHAT, headers=by_admin, json=body()).status_code == 200


@pytest.mark.threat("session token creates unlimited sessions")
def test_neither_many_at_once_nor_unknown_parents_make_more(lenient: Guarded) -> None:
    mine = lenient.client()

    def ask(number: int) -> httpx.Response:
        by = {"x-turnlog-parent-session-id": f"{mine.id}:unknown-{number}"} if number % 2 else {}
        return mine.chat_at(CHAT, headers={"x-session-id": mine.id, "x-turnlog-agent-id": f"a{number}", **by})

    with ThreadPoolExecutor(12) as pool:
        statuses = [reply.status_code for reply in pool.map(ask, range(12))]
    assert sorted(statuses) == [200, 200, *[409] * 10]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "simulator", "messages": [user("Hello")], **fields}


def test_a_browser_signs_in_and_out(guarded: Guarded) -> None:
    note, marks = f"{guarded.client().path}/annotations/note", {"x-turnlog-page": "1", "sec-fetch-site": "same-origin"}
    with httpx.Client(base_url=guarded.stand.server.base_url, timeout=20) as browser:
        for token, expected in (
            *(("wrong", (401, "unauthorized")), (1, (400, "invalid_request"))),
            ("x" * 5000, (413, "request_too_large")),
        ):
            assert error_of(browser.post("/ui/sign-in", json={"token": token})) == expected
        assert not browser.cookies
        assert browser.get("/ui/api/me").status_code == 401
        for token in (ADMIN, ADMIN_BEFORE):
            origin = {"origin": str(browser.base_url).rstrip("/")}
            reply = browser.post("/ui/sign-in", json={"token": token}, headers=origin)
            [cookie] = reply.headers.get_list("set-cookie")
            name, _, attributes = cookie.partition(";")
            assert (reply.status_code, token in name) == (200, False)
            assert {"HttpOnly", "Path=/", "Max-Age=43200"} <= {part.strip() for part in attributes.split(";")}
            assert "samesite=strict" in attributes.lower()
            assert "secure" not in attributes.lower()
            assert [browser.get(path).status_code for path in ("/ui/api/me", "/sessions")] == [200, 200]
            assert error_of(browser.post("/sessions", json={})) == (401, "unauthorized")
            assert browser.get("/sessions", headers={"sec-fetch-site": "cross-site"}).status_code == 401
            for without in (None, *marks):
                headers = {name: value for name, value in marks.items() if name != without}
                written = browser.put(note, json={"value": "seen"}, headers=headers)
                assert written.status_code == (200 if without is None else 401)
            asked = {"origin": "https://evil.example", "access-control-request-method": "PUT"}
            preflight = browser.options(note, headers=asked)
            assert not preflight.is_success
            assert not any(name.startswith("access-control") for name in preflight.headers)
            assert browser.post("/ui/sign-out").status_code == 200
            assert browser.get("/ui/api/me").status_code == 401
        secure = browser.post("/ui/sign-in", json={"token": ADMIN}, headers={"x-forwarded-proto": "https"})
        assert "; secure" in secure.headers["set-cookie"].lower()


@pytest.mark.threat("script injection into the page")
@pytest.mark.parametrize("path", ["/sessions", "/export", "/groups/g", "/health", "/nowhere", "/v1/models"])
def test_replies_are_data_to_a_browser(guarded: Guarded, path: str) -> None:
    for client in (guarded.admin, guarded.stranger):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert "access-control-allow-origin" not in headers


@pytest.mark.threat("leaked token stays valid")
def test_both_kinds_of_token_rotate_and_a_root_path_changes_nothing(
    guarded: Guarded, places: Places, sglang: SimulatorProcess
) -> None:
    new = {"TURNLOG_ADMIN_TOKEN": f"a-new-admin-token,{ADMIN}", "TURNLOG_SESSION_SECRET": "a-new-session-secret"}
    under_a_path = {**new, "UVICORN_ROOT_PATH": "/turnlog"}
    given = guarded.client(session_id="rotated")
    with guarded_serving(places.new("rotated"), sglang.base_url, environment=under_a_path) as rotated:
        mine = rotated.client(session_id="rotated")
        assert mine.token != given.token
        assert rotated.stranger.get(mine.path, headers=bearer(given.token)).status_code == 401
        statuses = [
            rotated.stranger.get("/sessions", headers=bearer(token)).status_code
            for token in ("a-new-admin-token", ADMIN, ADMIN_BEFORE)
        ]
        assert statuses == [200, 200, 401]
        assert mine.chat_at(mine.chat_path).status_code == 200
        assert mine.chat_at(CHAT, headers={"x-session-id": mine.id}).status_code == 200
        assert error_of(mine.ask("GET", mine.chat_path)) == (405, "method_not_allowed")
        other = rotated.client()
        assert error_of(mine.ask("GET", other.path)) == (404, "session_not_found")
        assert error_of(mine.ask("GET", "/sessions")) == (403, "forbidden")
        assert rotated.stranger.get("/health").status_code == 200


def test_agents_below_a_session_use_its_token(guarded: Guarded) -> None:
    mine = guarded.client(history="linear")
    agent = {"x-claude-code-session-id": mine.id, "x-claude-code-agent-id": "sub"}
    deep = {**agent, "x-claude-code-agent-id": "deep", "x-claude-code-parent-agent-id": "sub"}
    odd = {**agent, "x-claude-code-agent-id": "a b/c", "x-claude-code-parent-agent-id": "d e/f"}
    plain = {"x-session-id": f"{mine.id}:plain"}
    for headers in (agent, deep, odd, plain):
        for _ in range(2):
            assert mine.chat_at(CHAT, headers=headers, nvext={}).status_code == 200
    listed = guarded.admin.get("/sessions", params={"limit": 4}).json()["sessions"]
    parents = {one["session_id"]: guarded.events(one["session_id"]).splitlines()[0] for one in listed}
    assert all(f'"parent":"{mine.id}' in created for created in parents.values())
    assert {f"{mine.id}:sub", f"{mine.id}:deep", f"{mine.id}:plain"} < set(parents)


def test_the_token_of_a_closed_session_does_what_can_still_be_done(guarded: Guarded) -> None:
    mine = guarded.client()
    assert mine.chat_at(mine.chat_path).status_code == 200
    assert mine.ask("DELETE", mine.path).status_code == 204
    assert error_of(mine.ask("GET", mine.path)) == (404, "session_closed")
    assert error_of(mine.chat_at(mine.chat_path)) == (404, "session_closed")
    assert "SessionClosed" in mine.ask("GET", f"{mine.path}/events").text
    assert error_of(mine.ask("GET", "/export", params={"session_id": mine.id})) == (403, "forbidden")
    assert error_of(mine.ask("DELETE", mine.path)) == (404, "session_closed")
