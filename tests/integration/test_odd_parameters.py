"""Integers, texts and cursors that a database cannot hold: 400 that names the parameter, on either database."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from app.domain.patterns import MAX_FLOAT32, MAX_INTEGER
from integration.stand import Stand, error_of, user

HUGE = 10**22
NUL = "a\x00b"
REQUIRED = {"/export/groups": {"consumer": "odd"}, "/ui/api/rollouts": {"rollout": "odd"}}


def cursor(place: object) -> str:
    """As no server gave it."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode()


def parameters(stand: Stand, kind: str) -> Iterator[tuple[str, str]]:
    """Path and name of each query parameter of this type that a GET has, as the OpenAPI document says."""
    for path, operations in stand.http.get("/openapi.json").json()["paths"].items():
        for parameter in operations.get("get", {}).get("parameters", ()):
            schema = parameter["schema"]
            types = {one.get("type") for one in (schema, *schema.get("anyOf", ()))}
            if parameter["in"] == "query" and kind in types:
                yield path, parameter["name"]


def refused(stand: Stand, method: str, path: str, name: str, query: dict[str, Any], body: object = None) -> str | None:
    """None where the answer is a 400 that names the parameter; else what it was."""
    with stand.http.stream(method, path, params={**REQUIRED.get(path, {}), **query}, json=body) as reply:
        if reply.status_code == 200:
            return f"{method} {path} {name}: 200"
        reply.read()
        found = error_of(reply)
        is_named = name in reply.json()["error"]["message"]
        return None if found == (400, "invalid_request") and is_named else f"{method} {path} {name}: {reply.text}"


def test_an_integer_that_no_database_holds_is_refused_by_name(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello")
    asked = list(parameters(stand, "integer"))
    assert {("/export", "limit"), ("/sessions", "limit"), ("/sessions/{session_id}/events", "after")} <= set(asked)
    wrong = [
        refused(
            stand,
            "GET",
            path.replace("{session_id}", talk.id).replace("{name}", "odd").replace("{turn}", "1"),
            name,
            {name: str(value)},
        )
        for path, name in asked
        for value in (HUGE, -HUGE, MAX_INTEGER + 1, "1" * 5000, "1.5", "²", NUL)
    ]
    assert [one for one in wrong if one is not None] == []


def test_a_text_with_a_nul_is_refused_by_name(stand: Stand) -> None:
    talk = stand.talk()
    asked = list(parameters(stand, "string"))
    assert {("/export", "group_prefix"), ("/sessions", "cursor"), ("/ui/api/sessions", "engine")} <= set(asked)
    wrong = [
        refused(
            stand,
            "GET",
            path.replace("{session_id}", talk.id).replace("{name}", "odd").replace("{turn}", "1"),
            name,
            {name: NUL},
        )
        for path, name in asked
    ]
    assert [one for one in wrong if one is not None] == []


FORGED: dict[str, tuple[object, ...]] = {
    "/sessions": ([1, NUL], [1e300, NUL], [10**400, "a"], [1, "\ud800"], [None, "a"], ["a", 1], {}),
    "/ui/api/sessions": (
        ["created_at", True, 1, NUL, ""],
        ["created_at", True, HUGE, "a", ""],
        ["created_at", True, "a", "a", ""],
    ),
    "/ui/api/live": ([NUL, [0, HUGE]], [1, [0, 0]], ["a", [-1, 0]], NUL),
    "/ui/api/exports": ({"epoch": NUL, "low": [0, 0]}, {"epoch": "a", "low": [HUGE, 0]}),
    "/export": (
        {"epoch": NUL, "low": [0, 0]},
        {"epoch": "a", "low": [HUGE, 0]},
        {"epoch": "a", "low": [0, 0], "high": [-1, 0]},
        {"epoch": "a", "low": [0, 0], "given": HUGE},
        {"epoch": "a", "low": [0, 0], "newest": MAX_INTEGER + 1},
    ),
}


@pytest.mark.parametrize("path", FORGED)
def test_a_cursor_that_no_list_gave_is_refused(stand: Stand, path: str) -> None:
    texts = ["ä", "a", base64.urlsafe_b64encode(NUL.encode()).decode(), *map(cursor, FORGED.get(path, ()))]
    wrong = [refused(stand, "GET", path, "cursor", {"cursor": text}) for text in texts]
    assert [one for one in wrong if one is not None] == []


BODIES: tuple[tuple[str, str, str, object], ...] = (
    ("POST", "/sessions", "attempt", {"attempt": HUGE}),
    ("POST", "/sessions", "rollback_window", {"rollback_window": HUGE}),
    ("POST", "/sessions", "group_id", {"group_id": NUL}),
    ("POST", "/sessions", "adapter", {"adapter": NUL}),
    ("POST", "/sessions", "session_id", {"session_id": NUL}),
    ("POST", "/sessions", "parent_session_id", {"parent_session_id": NUL}),
    ("PUT", "/sessions/{id}/reward", "turn", {"reward": 1, "turn": HUGE}),
    ("PUT", "/sessions/{id}/reward", "reward", {"reward": 10**400}),
    ("POST", "/sessions/{id}/samples", "max_seq_len", {"max_seq_len": HUGE}),
    ("POST", "/sessions/{id}/v1/chat/completions", "lora_path", {"messages": [user("Hello")], "lora_path": NUL}),
    ("POST", "/export/groups/ack", "groups", {"consumer": "odd", "groups": [NUL]}),
    ("POST", "/export/groups/ack", "consumer", {"consumer": NUL, "groups": []}),
    ("POST", "/adapters/a/resume", "version", {"version": NUL}),
    ("POST", "/skyrl/v1/abort_lora_requests", "lora_name", {"lora_name": NUL}),
    ("POST", "/engines", "url", {"url": f"http://{NUL}"}),
    ("POST", "/adapters/a%00b/pause", "name", {}),
    ("GET", "/adapters/a%00b", "name", None),
    ("GET", "/groups/a%00b", "group_id", None),
    ("GET", f"/sessions/{{id}}/turns/{HUGE}/routed_experts", "turn", None),
    ("GET", f"/sessions/{{id}}/rejected/{HUGE}", "fence", None),
)


def test_a_field_that_no_database_holds_is_refused_by_name(stand: Stand) -> None:
    talk = stand.talk()
    for method, path, name, body in BODIES:
        assert refused(stand, method, path.replace("{id}", talk.id), name, {}, body) is None


TURNS = {
    "chat/completions": '{"messages":[{"role":"user","content":"Hello"}],%s}',
    "completions": '{"prompt":"Hello",%s}',
    "messages": '{"model":"m","max_tokens":99,"messages":[{"role":"user","content":"Hello"}],%s}',
    "responses": '{"model":"m","input":"Hello",%s}',
}
UNHELD = ("1e999", "-1e999", "18446744073709551616", "-9223372036854775809", "1" * 400, "1" * 5000)


@pytest.mark.parametrize("route", TURNS)
def test_a_number_that_no_row_holds_is_refused_by_name(stand: Stand, route: str) -> None:
    talk = stand.talk()
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "anything"):
        for number in UNHELD:
            reply = stand.http.post(f"{talk.path}/v1/{route}", content=TURNS[route] % f'"{name}": {number}')
            assert (reply.status_code, name in reply.text) == (400, True), (name, number[:30], reply.text)
    assert (talk.types(), talk.generations()) == (["SessionCreated"], 0)
    largest = '"temperature":1e308,"top_k":18446744073709551615'
    assert stand.http.post(f"{talk.path}/v1/{route}", content=TURNS[route] % largest).status_code == 200
    [row] = talk.rows()
    assert (row["sampling"][0]["temperature"], row["sampling"][0]["top_k"]) == (1e308, 2**64 - 1)


def test_a_reward_that_32_bits_cannot_hold_is_refused_by_name(stand: Stand) -> None:
    """Trainers keep rewards as float32: the number would be infinite there."""
    talk = stand.talk()
    talk.say("Hello")
    for value in (3.5e38, -3.5e38, 1e308, 10**400):
        for body, name in (
            ({"reward": value}, "reward"),
            ({"reward": 1, "turn": 1, "components": {"tests": value}}, "components.tests"),
        ):
            assert refused(stand, "PUT", f"{talk.path}/reward", name, {}, body) is None
        assert refused(stand, "POST", f"{talk.path}/samples", "reward", {}, {"reward": value}) is None
    assert stand.http.put(f"{talk.path}/reward", json={"reward": MAX_FLOAT32}).status_code == 200
    [row] = talk.rows(shape="areal")
    assert row["rewards"] == pytest.approx([MAX_FLOAT32])


def test_what_is_kept_as_bytes_may_hold_a_nul(stand: Stand) -> None:
    talk = stand.talk(metadata={NUL: NUL, "count": HUGE})
    told = stand.http.put(f"{talk.path}/reward", json={"reward": 1, "components": {NUL: 1}})
    assert told.status_code == 200, told.text
    talk.say(NUL, model=NUL, sim={"weight_version": NUL})
    assert talk.state()["session"]["metadata"] == {NUL: NUL, "count": HUGE}
    (row,) = talk.rows()
    assert (row["reward_components"], row["messages"][0]) == ({NUL: 1.0}, user(NUL))


def test_the_largest_integer_is_taken(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello")
    for name in ("limit", "max_seq_len"):
        assert len(talk.rows(**{name: MAX_INTEGER})) == 1
    assert stand.http.get(f"{talk.path}/events", params={"after": MAX_INTEGER}).text == ""
