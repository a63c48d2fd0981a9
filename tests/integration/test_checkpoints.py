"""Checkpoints: the store goes back to a cut, nothing is lost, and clients of what came later are told so."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from integration.places import Places
from integration.routing import BOTH, problems
from integration.stand import Stand, Talk, error_of, serving, until
from ops.simulator.process import SimulatorProcess

VOLATILE = ("cursor", "as_of_seq")
"""Fields of a row that say where in the log it was read."""


@pytest.fixture(scope="module")
def used(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    with serving(places.new("checkpoints"), sglang.base_url, environment=BOTH) as made:
        yield made
        assert problems(made) == []


def make(stand: Stand, **body: Any) -> str:
    name = uuid.uuid4().hex
    response = stand.http.post("/checkpoints", json={"name": name, **body})
    assert response.status_code == 200, response.text
    return name


def restore(stand: Stand, name: str) -> dict[str, Any]:
    response = stand.http.post(f"/checkpoints/{name}/restore")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def listed(stand: Stand, name: str) -> dict[str, Any]:
    every = {one["name"]: one for one in stand.http.get("/checkpoints").json()["checkpoints"]}
    found: dict[str, Any] = every[name]
    return found


def delete(stand: Stand, *names: str) -> None:
    for name in names:
        assert stand.http.delete(f"/checkpoints/{name}").status_code == 204


def rows(talk: Talk, **parameters: Any) -> list[dict[str, Any]]:
    """The session's rows, without what says where in the log they were read."""
    return [
        {key: value for key, value in row.items() if key not in VOLATILE}
        for row in talk.rows(replay="true", **parameters)
    ]


def reward(stand: Stand, talk: Talk, value: float, **fields: Any) -> httpx.Response:
    return stand.http.put(f"{talk.path}/reward", json={"reward": value, **fields})


def said(stand: Stand, *texts: str, **body: Any) -> Talk:
    talk = stand.talk(**body)
    for text in texts:
        talk.say(text)
    return talk


def copy_of(talk: Talk, turns: int) -> Talk:
    """Another client of the session, which knows its first turns."""
    other = Talk(talk._stand, talk.id, talk.protocol)
    other.messages = talk.messages[: 2 * turns]
    return other


@pytest.mark.parametrize("history", ["linear", "tree"])
def test_a_session_is_again_what_it_was_and_goes_on_from_there(used: Stand, history: str) -> None:
    talk = said(used, "One", "Two", history=history)
    reward(used, talk, 0.25, components={"a": 1.0})
    talk.noted(note="Then", tags=[f"then-{talk.id}"])
    sampled = talk.committed()[0]["output_tokens"]
    talk.annotate("judge", "then", turn=1)
    talk.column(1, "values", [0.5] * sampled)
    talk.column(1, "values", [1.5] * sampled)
    at_cut = rows(talk, columns="values")
    name = make(used)
    early = copy_of(talk, 2)
    talk.say("Three")
    reward(used, talk, 0.75)
    talk.noted(note="Later", tags=[])
    talk.annotate("judge", "later", turn=3)
    for value in (2.5, 3.5):
        talk.column(1, "values", [value] * sampled)
    used.http.delete(f"{talk.path}/turns/1/annotations/judge")
    used.http.delete(talk.path)
    later = rows(talk, columns="values")

    done = restore(used, name)
    assert rows(talk, columns="values") == at_cut
    assert talk.state()["metadata"]["status"] == "open"
    [listed] = used.http.get("/sessions", params={"tag": f"then-{talk.id}"}).json()["sessions"]
    assert (listed["session_id"], listed["note"]) == (talk.id, "Then")
    assert [turn["state"] for turn in talk.tree()["turns"]] == ["committed", "committed", "undone"]
    assert [row["turn"] for row in talk.rows(explain="true") if "undone" in row.get("excluded", "")] == [3]
    assert error_of(refused := talk.chat([*talk.messages, {"role": "user", "content": "Four"}])) == (409, "restored")
    assert refused.headers["x-should-retry"] == "false"
    early.say("Three, another way")
    assert [row["prompt_length"] + row["response_length"] > 0 for row in rows(early)] == [True]

    back = restore(used, done["before"])
    assert rows(talk, columns="values") == later
    assert error_of(talk.chat(talk.messages)) == (404, "session_closed")
    restore(used, name)
    assert rows(talk, columns="values") == at_cut
    restore(used, back["before"])
    assert len(rows(early)[0]["turns"]) == 3
    delete(used, name, done["before"], back["before"])


def test_what_came_later_is_undone_and_comes_back(used: Stand) -> None:
    group = uuid.uuid4().hex
    name = make(used)
    talk = said(used, "One", group_id=group)
    reward(used, talk, 1.0)
    used.http.delete(talk.path)
    [row] = rows(talk)

    done = restore(used, name)
    assert done["undone"] >= 1
    assert rows(talk) == []
    assert used.http.get(f"/groups/{group}").status_code == 404
    for response in (
        talk.chat(talk.messages),
        used.http.get(talk.path),
        used.http.delete(talk.path),
        reward(used, talk, 2.0),
        used.http.post("/sessions", json={"session_id": talk.id}),
    ):
        assert error_of(response) == (409, "restored")
    assert handed_out(used, "late", group) == []

    restore(used, done["before"])
    assert rows(talk) == [row]
    assert handed_out(used, "late", group) == [group]
    delete(used, name, done["before"])


def handed_out(stand: Stand, consumer: str, *wanted: str, size: int = 1000) -> list[str]:
    """Of the wanted groups those that the consumer is given."""
    response = stand.http.get("/export/groups", params={"consumer": consumer, "size": size})
    assert response.status_code == 200, response.text
    return [group for line in response.text.splitlines() if (group := json.loads(line)["group_id"]) in wanted]


def test_erasure_wins_and_is_reported(used: Stand) -> None:
    talk, other = said(used, "One"), said(used, "One")
    name = make(used)
    other.say("Two")
    assert used.http.delete(talk.path, params={"erase": "true"}).status_code == 204
    assert listed(used, name)["erased"] == 1
    done = restore(used, name)
    assert done["erased"] == [talk.id]
    assert error_of(used.http.get(talk.path)) == (404, "session_closed")
    assert len(rows(other)[0]["turns"]) == 1
    late = said(used, "Later")
    restore(used, name)
    assert used.http.delete(late.path, params={"erase": "true"}).status_code == 204
    delete(used, name, done["before"])


def test_a_drain_waits_for_the_turns_in_flight_and_holds_the_others(used: Stand) -> None:
    talk, other = used.talk(), used.talk()
    slow = used.meanwhile(talk.say, "Slow", sim={"latency_s": 1.0})
    used.until_generating(talk)
    cut = used.meanwhile(make, used, cut="drain")
    until(lambda: used.http.get("/fleet").json()["held_for"] == "drain")
    held = used.meanwhile(other.say, "Held")
    until(lambda: used.http.get("/fleet").json()["held"] == 1)
    assert error_of(used.http.post("/checkpoints", json={"name": "second", "cut": "drain"})) == (409, "checkpoint_busy")
    name = cut.result()
    assert slow.result().status_code == 200
    assert held.result().status_code == 200
    restore(used, name)
    assert len(rows(talk)) == 1
    assert rows(other) == []
    delete(used, name)


def test_names_and_requests_that_are_refused(used: Stand) -> None:
    name = make(used)
    cases = (
        ({"name": name}, (409, "checkpoint_exists")),
        ({"name": "before-1"}, (400, "invalid_request")),
        ({"name": "a b"}, (400, "invalid_request")),
        ({"name": ".."}, (400, "invalid_request")),
        ({"name": "c", "cut": "later"}, (400, "invalid_request")),
    )
    for body, expected in cases:
        assert error_of(used.http.post("/checkpoints", json=body)) == expected
    delete(used, name)
    assert error_of(used.http.delete(f"/checkpoints/{name}")) == (404, "not_found")
    assert error_of(used.http.post(f"/checkpoints/{name}/restore")) == (404, "not_found")


def test_cursors_end_with_a_restore(used: Stand) -> None:
    cursor = used.http.get("/export", params={"limit": 1}).headers["x-turnlog-cursor"]
    name = make(used)
    done = restore(used, name)
    assert used.http.get("/export", params={"cursor": cursor}).status_code == 400
    delete(used, name, done["before"])
