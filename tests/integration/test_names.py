"""Names of sessions that come again: generations, and the requests that belong to an ended one."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from helpers.looking import change

from integration.guarded import Guarded
from integration.places import Places
from integration.stand import CHAT, Stand, error_of, standing, user

TOLD = "x-turnlog-session-id"


class Named:
    """A client that names its session in a header alone."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.name = uuid.uuid4().hex
        self.path = f"/sessions/{self.name}"

    def chat(self, text: str = "Hello", path: str = CHAT, headers: Mapping[str, str] | None = None) -> httpx.Response:
        body = {"model": "simulator", "messages": [user(text)]}
        url = self.stand.base_url + path  # as it is: a path of two slashes would be merged with the base URL
        return self.stand.http.post(url, json=body, headers={"x-session-id": self.name, **(headers or {})})

    def generate(self, key: str | None = None, ids: list[int] | None = None) -> httpx.Response:
        """As SkyRL's client does."""
        body = {"token_ids": ids or [5, 6, 7], "sampling_params": {"max_tokens": 8}, "request_id": key}
        return self.stand.http.post("/inference/v1/generate", json=body, headers={"x-session-id": self.name})

    def finish(self, name: str | None = None) -> dict[str, Any]:
        response = self.stand.http.post("/finish_session", params={"session_id": name or self.name})
        assert response.status_code == 200, response.text
        return dict(response.json())

    def generations(self) -> list[tuple[int, str, int]]:
        """Number, status and turns of each session of the name."""
        listed = self.stand.get("/sessions", name=self.name, order="asc")["sessions"]
        return sorted((one["generation"], one["status"], one["turns"]) for one in listed)

    def events(self, generation: int) -> list[dict[str, Any]]:
        response = self.stand.http.get(f"{self.path}/events", params={"generation": generation})
        return [json.loads(line) for line in response.content.splitlines()]


def test_a_finished_name_begins_another_session(stand: Stand) -> None:
    """The first has the name as its id, each later one an id like any other."""
    named, ids = Named(stand), []
    for number in (1, 2, 3):
        replies = [named.chat(), named.chat("More")]
        assert [reply.status_code for reply in replies] == [200, 200]
        ids.append(replies[0].headers.get(TOLD, named.name))
        assert named.finish() == {"session_id": ids[-1], "name": named.name, "generation": number} == named.finish()
    assert ids[0] == named.name
    assert len({len(session_id) for session_id in ids[1:]} | {32}) == 1
    assert named.generations() == [(1, "closed", 2), (2, "closed", 2), (3, "closed", 2)]
    for number in (1, 2, 3):
        created, *_, closed = named.events(number)
        assert (created["name"], created["generation"], closed["reason"]) == (named.name, number, "finished")
    rows = stand.rows(name=named.name)
    assert sorted((row["generation"], row["session_id"], row["name"]) for row in rows) == [
        (1, ids[0], named.name),
        (1, ids[0], named.name),
        *((number, ids[number - 1], named.name) for number in (2, 2, 3, 3)),
    ]
    assert {row["session_id"] for row in stand.rows(name=named.name, generation=2)} == {ids[1]}
    lines = stand.http.get("/events", params={"name": named.name, "generation": 3, "type": "TurnCommitted"}).text
    assert {json.loads(line).get("session_id", ids[2]) for line in lines.splitlines()} == {ids[2]}


FORMS = ("{path}", "{path}/", "/{path}", "/sessions//{name}", "/sessions/%{hex}", "{path}?generation=2")
"""Spellings of a path below which a session's routes are."""


def test_a_path_with_the_name_leads_to_the_newest_session(stand: Stand) -> None:
    named = Named(stand)
    first = named.chat().headers.get(TOLD, named.name)
    named.finish()
    second = named.chat().headers[TOLD]
    spelled = {"path": named.path, "name": named.name, "hex": f"{ord(named.name[0]):x}{named.name[1:]}"}
    for form in FORMS:
        reply = stand.http.get(stand.base_url + form.format(**spelled), follow_redirects=True)
        assert reply.json()["session"]["generation"] == 2, form
    assert stand.get(named.path)["session_id"] == second
    assert stand.http.head(named.path).status_code == 200
    for route in ("messages", "tree", "state", "events"):
        assert stand.http.get(f"{named.path}/{route}").text == stand.http.get(f"/sessions/{second}/{route}").text
        assert stand.http.get(f"{named.path}/{route}", params={"generation": 1}).text != "", route
    turns = (f"{named.path}{CHAT}", f"/{named.path}/{CHAT}", f"/ng-rollout/{named.name}{CHAT}")
    for path in (*turns, f"{turns[0]}?generation=2"):
        assert named.chat("By path", path).status_code == 200
    assert stand.http.put(f"{named.path}/reward", json={"reward": 2.0}).json()["session_id"] == second
    for number, expected in (
        (1, (404, "session_closed")),
        (3, (404, "session_not_found")),
        (0, (400, "invalid_request")),
    ):
        assert error_of(named.chat(path=f"{named.path}{CHAT}?generation={number}")) == expected
    late = stand.http.put(f"{named.path}/reward", params={"generation": 1}, json={"reward": 1.0})
    assert late.json()["session_id"] == first
    assert error_of(stand.http.get(named.path, params={"generation": 3})) == (404, "session_not_found")
    assert error_of(stand.http.get(named.path, params={"generation": "0"})) == (400, "invalid_request")
    assert stand.http.delete(named.path).status_code == 204
    assert named.generations() == [(1, "closed", 1), (2, "closed", 5)]


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("mark", ["idempotency-key", "x-stainless-retry-count", "request_id"])
def test_a_retry_of_an_ended_generation_gets_its_reply(stand: Stand, mark: str, is_begun: bool) -> None:
    named = Named(stand)
    marked = {mark: "1"}
    ask = named.generate if mark == "request_id" else lambda *_: named.chat(headers=marked)
    reply = ask("mine")
    named.finish()
    if is_begun:
        named.chat("Another")
    marked["x-dynamo-session-final"] = "true"  # It ends the session of its own turn alone.
    again = ask("mine")
    assert again.json() == reply.json()
    assert (again.headers["x-turnlog-replayed"], again.headers[TOLD]) == ("true", named.name)
    assert named.generations() == [(1, "closed", 1), (2, "open", 1)][: 1 + is_begun]


def test_a_turn_in_flight_ends_with_its_generation(stand: Stand) -> None:
    """Neither it nor its retry goes into the next one."""
    named = Named(stand)
    slow = {"model": "simulator", "messages": [user("Slow")], "sim": {"latency_s": 30}}
    headers = {"x-session-id": named.name, "idempotency-key": "slow"}
    flight = stand.meanwhile(stand.http.post, CHAT, json=slow, headers=headers)
    stand.until_generating(stand.known(named.name))
    joined = stand.meanwhile(stand.http.post, CHAT, json=slow, headers=headers)
    named.finish()
    assert {error_of(flight.result()), error_of(joined.result())} == {(404, "session_closed")}
    assert error_of(stand.http.post(CHAT, json=slow, headers=headers)) == (404, "session_closed")
    assert named.generations() == [(1, "closed", 0)]


def test_a_creation_begins_the_next_generation_too(stand: Stand) -> None:
    named = Named(stand)
    create = {"session_id": named.name, "group_id": "task"}
    first = stand.http.post("/sessions", json=create).json()
    named.finish()
    second = stand.http.post("/sessions", json=create).json()
    assert first["session_id"] == named.name != second["session_id"]
    assert stand.http.post("/sessions", json=create).json() == second
    assert error_of(stand.http.post("/sessions", json={"session_id": named.name})) == (409, "session_exists")
    assert named.chat().headers[TOLD] == second["session_id"]
    assert stand.get(named.path)["session"]["group_id"] == "task"


def test_a_token_is_that_of_one_generation(guarded: Guarded) -> None:
    """It stays with that one where the header has the name."""
    first = guarded.client(session_id="name")
    assert guarded.admin.post("/finish_session?session_id=name").status_code == 200
    second, named = guarded.client(session_id="name"), {"x-session-id": "name"}
    said = second.ask("POST", "/v1/responses", json={"model": "m", "input": "Hello"}, headers=named)
    assert (said.status_code, said.headers[TOLD]) == (200, second.id)
    assert second.ask("GET", f"/v1/responses/{said.json()['id']}", headers=named).json() == said.json()
    for path in (CHAT, f"/sessions/name{CHAT}", f"/sessions/name{CHAT}?generation=2"):
        body = {"model": "simulator", "messages": [user("Hello")]}
        assert error_of(first.ask("POST", path, json=body, headers=named)) == (404, "session_closed")
    listed = guarded.admin.get("/sessions", params={"name": "name"}).json()["sessions"]
    assert sorted((one["generation"], one["turns"]) for one in listed) == [(1, 0), (2, 1)]


def test_any_other_close_is_for_good(stand: Stand) -> None:
    named = Named(stand)
    named.chat()
    named.finish()
    named.chat()
    assert stand.http.delete(named.path).status_code == 204
    assert named.finish()["generation"] == 2
    assert error_of(named.chat()) == (404, "session_closed")
    assert error_of(stand.http.post("/sessions", json={"session_id": named.name})) == (409, "session_closed")
    assert [number for number, _, _ in named.generations()] == [1, 2]


def test_a_name_that_no_session_has_is_ignored(stand: Stand) -> None:
    named = Named(stand)
    assert named.finish() == {"session_id": None, "name": named.name, "generation": None}
    for query in ("", "?session_id=", "?session_id=a%2Fb", "?session_id=a&session_id=b"):
        assert error_of(stand.http.post(f"/finish_session{query}")) == (400, "invalid_request")
    made = stand.talk()
    made.say("Hello")
    assert named.finish(made.id) == {"session_id": made.id, "name": None, "generation": None}
    assert error_of(made.chat([user("More")])) == (404, "session_closed")


def test_agents_are_of_the_newest_generation(stand: Stand) -> None:
    named = Named(stand)
    linear = {"session_id": named.name, "history": "linear"}
    for _ in range(2):
        root = stand.http.post("/sessions", json=linear).json()["session_id"]
        assert named.chat(headers={"x-turnlog-agent-id": "sub"}).status_code == 200
        assert stand.known(f"{root}:sub").committed()
        named.finish()
    assert named.chat(headers={"x-turnlog-agent-id": "sub"}).status_code == 200
    assert [number for number, _, _ in named.generations()] == [1, 2, 3]


def test_a_session_that_cannot_be_read_can_be_erased(places: Places) -> None:
    with standing(places.new("names")) as stand:
        named, made = Named(stand), stand.talk()
        named.chat()
        made.say("Hello")
        stand.server.kill()
        stand.server.start()
        for path in (named.path, made.path):
            session_id = path.rpartition("/")[2]
            change(stand.url, "UPDATE events SET data = :junk WHERE session_id = :id", junk=b"{junk", id=session_id)
            assert error_of(stand.http.get(path)) == (500, "session_unreadable")
            assert stand.http.delete(path, params={"erase": "true"}).status_code == 204


def test_no_path_begins_a_session(stand: Stand) -> None:
    named = Named(stand)
    named.chat()
    named.finish()
    assert error_of(named.chat(path=named.path + CHAT)) == (404, "session_closed")
    assert error_of(stand.http.get(named.path)) == (404, "session_closed")
    assert len(named.generations()) == 1
