"""The life of a session around its turns: create, list, read, reward, close, erase, follow."""

from __future__ import annotations

import json
import re
import socket
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.api.creation import CreateSession
from app.extras import release
from integration.stand import WEATHER, Stand, error_of, until, user


def fresh() -> str:
    return f"s-{uuid.uuid4().hex}"


def test_create_with_no_body_names_a_session_and_its_base_url(stand: Stand) -> None:
    response = stand.http.post("/sessions")
    assert response.status_code == 200
    body = response.json()
    assert body["base_url"] == f"/sessions/{body['session_id']}/v1"
    assert body["url"] == f"{stand.base_url}/sessions/{body['session_id']}"
    assert stand.http.get(f"/sessions/{body['session_id']}").status_code == 200


def test_create_refuses_what_is_no_json_object_bad_ids_and_bad_fields(stand: Stand) -> None:
    for content in ("{", "[]", '"x"', "null ,", '{"session_id": NaN}'):
        assert error_of(stand.http.post("/sessions", content=content)) == (400, "invalid_request"), content
    ids = ({"session_id": name} for name in ("", ".", "..", "a/b", "a b", "é", "x" * 129, "a\n", 7, True))
    windows = ({"rollback_window": value} for value in (-1, True))
    words = {"retain": "some", "matcher": "loose", "on_divergence": "ignore", "history": "graph", "metadata": []}
    for body in (*ids, *windows, *({name: value} for name, value in words.items())):
        assert error_of(stand.http.post("/sessions", json=body)) == (400, "invalid_request"), body


def test_a_field_that_is_unknown_is_told_with_those_that_are_known(stand: Stand) -> None:
    for name, told in (("histry", "did you mean history?"), ("judge", "supported are adapter, attempt, ")):
        for size in (1, 1 << 15):
            refused = stand.http.post("/sessions", json={name: "x" * size})
            assert error_of(refused) == (400, "invalid_request")
            assert f"{name} is not a field of the body; {told}" in refused.text


def test_create_is_idempotent_and_conflicts_are_told(stand: Stand) -> None:
    body = {"session_id": fresh(), "group_id": "g", "attempt": 2, "metadata": {"a": 1, "b": [2]}}
    first = stand.http.post("/sessions", json=body)
    again = stand.http.post("/sessions", json={**body, "metadata": {"b": [2], "a": 1}})
    assert (again.status_code, again.json()) == (200, first.json())
    other = stand.http.post("/sessions", json={**body, "attempt": 3})
    assert error_of(other) == (409, "session_exists")
    assert other.headers["x-should-retry"] == "false"
    stand.http.delete(f"/sessions/{body['session_id']}")
    assert error_of(stand.http.post("/sessions", json=body)) == (409, "session_closed")
    stand.http.delete(f"/sessions/{body['session_id']}", params={"erase": True})
    assert error_of(stand.http.post("/sessions", json=body)) == (409, "session_closed")


def test_a_session_reads_back_as_it_was_sent_and_received(stand: Stand) -> None:
    talk = stand.talk(group_id="g7")
    replies = [talk.say("Hello", temperature=0.5).json(), talk.say("And then?").json()]
    state = talk.state()
    assert state["session_id"] == talk.id
    requests = [one["body"] for one in stand.engine_requests(talk.id)]
    assert [record["request"] for record in state["records"]] == requests
    assert [record["response"] for record in state["records"]] == replies
    for record in state["records"]:
        assert (record["method"], record["path"], record["status_code"]) == ("POST", "/v1/chat/completions", 200)
        assert record["request_timestamp"] <= record["timestamp"]
    choice = replies[-1]["choices"][0]
    ids = choice["prompt_token_ids"] + [entry[1] for entry in choice["meta_info"]["output_token_logprobs"]]
    metadata = state["metadata"]
    assert metadata["accumulated_token_ids"] == ids
    assert {"max_trim_tokens", "status", "version", "group_id", "reward"} <= set(metadata)
    assert (metadata["status"], metadata["group_id"], metadata["reward"]) == ("open", "g7", None)
    assert metadata["version"] == talk.events()[-1]["seq"]


GIVEN: dict[str, Any] = (
    {"group_id": "g8", "attempt": 3, "rollback_window": 4, "retain": "all", "history": "linear"}
    | {"metadata": {"snapshot": "img-1", "big": 2**70, "nested": [{"é": None}], "small": 1e-300}, "upstream": None}
    | {"on_divergence": "segment", "on_drift": "reject", "matcher": "strict", "adapter": "a1", "on_abort": "fail"}
    | {"stream_mode": "live", "params": {"temperature": 0.5, "stop": ["é"]}, "model": "simulator"}
    | {"params_mode": "refuse", "evaluation": True, "capture": "tokens", "on_limit": "length"}
    | {"limits": {"turns": 5, "per": "session"}, "parent_session_id": "another", "run": "b", "group_size": 4}
)
DEFAULTS = (
    dict.fromkeys(GIVEN)
    | {"metadata": {}, "rollback_window": 1, "retain": "window", "on_divergence": "reject", "on_drift": "segment"}
    | {"matcher": "tolerant", "stream_mode": "whole", "params_mode": "override", "capture": "tokens"}
    | {"on_limit": "error", "run": "default"}
)


def test_what_is_new_in_each_record_is_the_whole_of_the_last_one(stand: Stand) -> None:
    talk = stand.talk()
    tooled: dict[str, Any] = {"tools": [WEATHER]}
    for text, fields in (("one", tooled), ("two " * 40_000, {}), ("three", tooled), ("four", tooled)):
        talk.say(text, **fields)
    full, new, none = (stand.get(talk.path, records=records) for records in ("full", "new", "none"))
    assert [one["records"] == stand.get(talk.path)["records"] for one in (full, new, none)] == [True, False, False]
    assert none == {**full, "records": []}
    added = [record["request"].pop("messages") for record in new["records"]]
    whole = [record["request"].pop("messages") for record in full["records"]]
    assert [len(messages) for messages in added] == [1, 1, 1, 1]
    replies = [record["response"]["choices"][0]["message"] for record in new["records"]]
    said = [message for messages, reply in zip(added, replies, strict=True) for message in (*messages, reply)]
    assert said[:-1] == [{key: message[key] for key in said[at]} for at, message in enumerate(whole[-1])]
    tools = [[record["request"].pop("tools", "not said") for record in one["records"]] for one in (full, new)]
    assert tools == [
        [[WEATHER], "not said", [WEATHER], [WEATHER]],
        [[WEATHER], None, [WEATHER], "not said"],
    ]
    for record in full["records"]:
        record["response"]["choices"][0]["prompt_token_ids"] = None
    assert new == full
    assert error_of(stand.http.get(talk.path, params={"records": "all"})) == (400, "invalid_request")


def test_a_session_reads_back_what_was_given_at_its_creation_and_else_defaults(stand: Stand) -> None:
    assert {"session_id", *GIVEN} == set(CreateSession.model_fields) - {"temperature", "top_p", "top_k"}
    for given, expected in ((GIVEN, GIVEN), ({}, DEFAULTS)):
        talk = stand.talk(session_id=(name := fresh()), **given)
        state = talk.state()
        session = state["session"]
        if given:
            assert (session.pop("budgets")[0]["limits"], session.pop("limit")) == (given["limits"], None)
        named = {"session_id": name, "name": name, "generation": 1}
        assert session == {**named, **expected, "note": None, "tags": []}
        assert (state["records"], state["metadata"]["accumulated_token_ids"]) == ([], [])
        assert "snapshot" not in state["metadata"], "that is what is so now"


def test_programs_may_probe_their_base_url(stand: Stand) -> None:
    closed, talk = stand.talk(), stand.talk()
    assert stand.http.delete(closed.path).status_code == 204
    for path in ("/", "/health", "/ready", "/metrics", talk.path, f"{talk.path}/", closed.path, "/sessions/nobody"):
        head, whole = (stand.http.request(method, path, follow_redirects=True) for method in ("HEAD", "GET"))
        assert (head.status_code, head.headers["content-type"]) == (whole.status_code, whole.headers["content-type"])
        assert (head.content, bool(whole.content)) == (b"", True)
    browser = stand.http.get("/", headers={"accept": "text/html,*/*"}, follow_redirects=True)
    assert (browser.status_code, browser.url.path) == (200, "/ui")


def test_rewards_are_kept_and_the_last_one_counts(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello")
    for body in ({"reward": 1}, {"reward": -0.25, "components": {"style": 0.5}}, {"reward": 3, "turn": 1}):
        assert stand.http.put(f"{talk.path}/reward", json=body).status_code == 200
    assert talk.state()["metadata"]["reward"] == -0.25
    [row] = talk.rows()
    assert (row["reward"], row["reward_components"]) == (-0.25, {"style": 0.5})
    assert talk.types()[-3:] == ["RewardAssigned"] * 3


NUMBERS = ("NaN", "true", '"1"', "-1e999", "1" * 401)
BAD_REWARDS = (
    *(f'{{"reward": {value}}}' for value in (*NUMBERS, "Infinity", "null", "1" * 5000)),
    *(f'{{"reward": 1, "components": {{"a": {value}}}}}' for value in NUMBERS),
    *(f'{{"reward": 1, "turn": {value}}}' for value in ("0", "2", "true", "1" * 401)),
    *("{}", "", "[]", '{"reward": 1, "other": 2}'),
)


def test_a_bad_reward_is_refused_and_leaves_no_event(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello")
    before = talk.types()
    for content in BAD_REWARDS:
        refused = stand.http.put(f"{talk.path}/reward", content=content)
        assert error_of(refused) == (400, "invalid_request"), content[:60]
    assert talk.types() == before


def test_a_closed_session_answers_only_what_it_should(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello")
    response = stand.http.delete(talk.path)
    assert (response.status_code, response.content) == (204, b"")
    for answer in (
        stand.http.get(talk.path),
        stand.http.delete(talk.path),
        talk.chat([user("Hello")]),
        stand.http.post(talk.chat_path, content="{"),
    ):
        assert error_of(answer) == (404, "session_closed")
    assert stand.http.put(f"{talk.path}/reward", json={"reward": 2.5}).status_code == 200
    assert talk.types()[-2:] == ["SessionClosed", "RewardAssigned"]
    [row] = talk.rows()
    assert (row["reward"], row["final"]) == (2.5, True)


def test_erase_removes_the_content_from_every_file(stand: Stand) -> None:
    talk = stand.talk(metadata={"label": "the-secret-label"})
    secret = f"secret{uuid.uuid4().hex}"
    talk.say(secret, sim={"text": f"answer-{secret}"})
    assert stand.http.delete(talk.path, params={"erase": True}).status_code == 204
    assert stand.http.delete(talk.path, params={"erase": True}).status_code == 204
    assert error_of(stand.http.get(talk.path)) == (404, "session_closed")
    assert error_of(stand.http.put(f"{talk.path}/reward", json={"reward": 1}))[0] == 404
    assert talk.types()[-1] == "SessionErased"
    assert talk.rows() == []
    [explained] = talk.rows(explain=True)
    assert explained["session_id"] == talk.id
    folder = stand.server.database_path.parent
    for path in folder.glob("*"):
        assert secret.encode() not in path.read_bytes(), path.name


def test_health_ready_and_models(stand: Stand) -> None:
    first, second = (stand.get("/health") for _ in range(2))
    assert (first["status"], len(first["session_server_instance_id"])) == ("ok", 32)
    assert first["release"] == release()
    assert first["session_server_instance_id"] == second["session_server_instance_id"]
    until(lambda: stand.http.get("/ready").is_success)
    direct = stand.sim.get("/v1/models").content
    assert stand.http.get("/v1/models").content == direct
    assert stand.http.get(f"{stand.talk().path}/v1/models").content == direct


def test_a_route_names_all_its_methods(stand: Stand) -> None:
    for method, path, allowed in (
        ("PATCH", "/sessions", "GET, POST"),
        ("PUT", "/sessions/x", "GET, HEAD, DELETE"),
        ("POST", "/sessions/x/reward", "PUT"),
        ("POST", "/sessions/x/reward/", "PUT"),
        ("POST", "/health", "GET, HEAD"),
        ("POST", "/ready/", "GET, HEAD"),
    ):
        response = stand.http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed), path


def test_a_misspelt_erasure_closes_nothing(stand: Stand) -> None:
    talk = stand.talk()
    for query in ("erase=maybe", "erase=", "erase=true&erase=7"):
        response = stand.http.delete(f"/sessions/{talk.id}?{query}")
        assert error_of(response) == (400, "invalid_request")
        message = "Input should be a valid boolean, unable to interpret input"
        assert response.json()["error"]["message"] == f"erase={query.rpartition('=')[2]}: {message}"
    assert stand.http.delete("/sessions/none?erase=maybe").status_code == 400
    assert stand.http.delete("/sessions/a%20b?erase=maybe").status_code == 404
    assert stand.http.delete(f"/sessions/{talk.id}?erase=false&other=1").status_code == 204


def test_requests_that_are_sent_ahead_have_each_its_own_body(stand: Stand) -> None:
    """Also one whose body comes in two pieces between others that come whole."""
    ids = [uuid.uuid4().hex for _ in range(3)]
    bodies = [json.dumps({"session_id": each}).encode() for each in ids]
    heads = [b"POST /sessions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body) for body in bodies]
    sent = b"".join(head + body for head, body in zip(heads, bodies, strict=True))
    address = urlsplit(stand.server.base_url)
    cut = len(heads[0] + bodies[0] + heads[1]) + 5
    with socket.create_connection((address.hostname, address.port or 80), timeout=30) as client:
        client.sendall(sent[:cut])
        replies = client.recv(1 << 16)
        client.sendall(sent[cut:])
        while replies.count(b'"session_id"') < len(ids):
            replies += client.recv(1 << 16)
    assert [each.decode() for each in re.findall(rb'"session_id":"(\w+)"', replies)] == ids


def test_the_quick_loop_and_parser_are_taken_without_being_asked_for(stand: Stand) -> None:
    mapped = Path(f"/proc/{stand.server.pid}/maps").read_text()
    assert "uvloop" in mapped
    assert "httptools" in mapped


def test_create_takes_every_legal_id(stand: Stand) -> None:
    for name in ("a", "A.b_c:d-e", "...a", ""):
        legal = f"{name}{uuid.uuid4().hex}" if name else "x" * 128
        assert stand.http.post("/sessions", json={"session_id": legal}).json()["session_id"] == legal
