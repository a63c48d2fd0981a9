"""Checkpoints: the store goes back to a cut, nothing is lost, and clients of what came later are told so."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.places import Places
from integration.routing import BOTH, EXPERTS, problems
from integration.stand import Stand, Talk, error_of, held, serving, until
from integration.test_calls import ask, calling, ids_of, results, with_arguments
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


def restore(stand: Stand, name: str, run: str = "default") -> dict[str, Any]:
    response = stand.http.post(f"/checkpoints/{name}/restore", params={"run": run})
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
    talk.annotate("after", True)
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
    assert talk.id not in {one["session_id"] for one in used.get("/sessions", annotated="after")["sessions"]}
    assert [turn["state"] for turn in talk.tree()["turns"]] == ["committed", "committed", "undone"]
    [undone] = [row for row in talk.rows(explain="true") if "undone" in row.get("excluded", "")]
    assert (undone["turn"], undone["lost_tokens"]) == (3, talk.committed()[2]["output_tokens"])
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
    with held(used.sim):
        slow = used.meanwhile(talk.say, "Slow")
        used.until_generating(talk)
        cut = used.meanwhile(make, used, cut="drain")
        until(lambda: used.http.get("/fleet").json()["held_for"] == "drain")
        late = used.meanwhile(other.say, "Held")
        until(lambda: used.http.get("/fleet").json()["held"] == 1)
        second = used.http.post("/checkpoints", json={"name": "second", "cut": "drain"})
        assert error_of(second) == (409, "checkpoint_busy")
    name = cut.result()
    assert slow.result().status_code == 200
    assert late.result().status_code == 200
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


def finished(stand: Stand, group: str) -> Talk:
    talk = said(stand, "One", group_id=group)
    assert reward(stand, talk, 1.0).status_code == 200
    assert stand.http.delete(talk.path).status_code == 204
    return talk


def test_leases_and_acknowledgements_are_the_cuts(used: Stand) -> None:
    acked, leased, free = groups = [uuid.uuid4().hex for _ in range(3)]
    finished(used, acked)
    assert handed_out(used, "c", *groups) == [acked]
    assert used.http.post("/export/groups/ack", json={"consumer": "c", "groups": [acked]}).json()["acknowledged"]
    finished(used, leased)
    assert handed_out(used, "c", *groups) == [leased]
    name = make(used)
    finished(used, free)
    assert handed_out(used, "d", *groups) == [free]
    for consumer, group in (("c", leased), ("d", free)):
        answer = used.http.post("/export/groups/ack", json={"consumer": consumer, "groups": [group]})
        assert answer.json()["acknowledged"] == [group]

    done = restore(used, name)
    assert handed_out(used, "d", *groups) == []
    assert handed_out(used, "c", *groups) == [leased]
    assert used.http.post("/export/groups/ack", json={"consumer": "c", "groups": [acked]}).json()["already"]
    restore(used, done["before"])
    assert handed_out(used, "c", *groups) == []
    delete(used, name, done["before"])


def kept(talk: Talk) -> set[int]:
    """The turns whose payloads can be read."""
    dropped = {turn for event in talk.events() if event["type"] == "BlobsTombstoned" for turn in event["turns"]}
    return {event["turn"] for event in talk.committed()} - dropped


def test_the_janitor_leaves_what_a_checkpoint_has(sglang: SimulatorProcess, places: Places) -> None:
    environment = {**BOTH, "TURNLOG_CLOSED_REPLAY_TTL_S": "3", "TURNLOG_CLOSED_TTL_S": "3"}
    with serving(places.new("janitor"), sglang.base_url, environment=environment) as stand:
        kept = said(stand, "One")
        [row] = rows(kept)
        stand.http.delete(kept.path)
        name = make(stand)
        other = said(stand, "One")
        stand.http.delete(other.path)
        until(lambda: other.types()[-1] == "SessionErased")
        assert rows(kept) == [{**row, "final": True}]
        late = said(stand, "Later")
        done = restore(stand, name)
        delete(stand, name, done["before"])
        until(lambda: kept.types()[-1] == late.types()[-1] == "SessionErased")
        assert problems(stand) == []


@pytest.mark.parametrize("history", ["linear", "tree"])
def test_payloads_are_kept_until_the_checkpoint_is_deleted(used: Stand, history: str) -> None:
    talk = said(used, "One", "Two", history=history)
    name = make(used)
    [at_cut] = rows(talk)
    for text in ("Three", "Four", "Five", "Six"):
        talk.say(text)
    assert 2 in kept(talk)
    assert 4 not in kept(talk)
    done = restore(used, name)
    assert rows(talk) == [at_cut]
    assert at_cut[EXPERTS] is not None
    early = copy_of(talk, 2)
    for text in ("Sieben", "Acht", "Neun"):
        early.say(text)
    assert 2 in kept(talk)
    restore(used, done["before"])
    assert len(rows(talk)[0]["turns"]) == 6
    for one in used.http.get("/checkpoints").json()["checkpoints"]:
        delete(used, one["name"])
    talk.say("Seven")
    assert kept(talk).isdisjoint({1, 2, 3, 4, 7, 8})


@pytest.mark.parametrize("history", ["linear", "tree"])
def test_an_undone_reply_is_known_by_its_calls_however_they_are_spelled(used: Stand, history: str) -> None:
    talk = said(used, "One", history=history)
    name = make(used)
    talk.messages = [*talk.messages, {"role": "user", "content": "Two"}]
    [given] = ids_of("chat", ask(talk, calling('{"cmd": "echo', ids=[""])))
    done = restore(used, name)
    goes_on = [*with_arguments("chat", talk.messages, "{}"), *results("chat", [given])]
    assert error_of(talk.chat(goes_on)) == (409, "restored")
    delete(used, name, done["before"])


def finish(stand: Stand, talk: Talk) -> None:
    assert stand.http.delete(talk.path).status_code == 204
    assert reward(stand, talk, 1.0).status_code == 200


def test_groups_are_counted_without_the_sessions_that_are_undone(used: Stand) -> None:
    """Alone in its group; beside a session of before; as its root, or its child. `ops.verify` counts alike."""
    alone, mixed, orphaned, family = (f"{name}-{uuid.uuid4().hex}" for name in ("alone", "mixed", "orphaned", "family"))
    old, root = said(used, "One", group_id=mixed), said(used, "One", group_id=family)
    orphan = said(used, "One", group_id=orphaned, parent_session_id=f"{orphaned}-root")
    for talk in (old, orphan):
        finish(used, talk)
    name = make(used)
    for group_id in (alone, mixed):
        said(used, "One", group_id=group_id)
    said(used, "One", session_id=f"{orphaned}-root", group_id=orphaned)
    said(used, "One", parent_session_id=root.id, group_id=family)
    done = restore(used, name)
    finish(used, root)
    counted = {group_id: used.http.get(f"/groups/{group_id}").json() for group_id in (mixed, orphaned, family)}
    assert [len(group["attempts"]) for group in counted.values()] == [1, 1, 1]
    assert [group["complete"] for group in counted.values()] == [True, True, True]
    assert problems(used) == []
    delete(used, name, done["before"])


def test_a_turn_in_flight_loses_its_claim(used: Stand) -> None:
    talk = said(used, "One")
    name = make(used)
    with held(used.sim):
        slow = used.meanwhile(talk.chat, [*talk.messages, {"role": "user", "content": "Slow"}])
        used.until_generating(talk, 2)
        restore(used, name)
    assert error_of(slow.result()) == (409, "claim_lost")
    assert slow.result().headers["x-should-retry"] == "true"
    assert talk.events()[-2]["reason"] == "restored"
    talk.say("Again")
    delete(used, name)


def test_payloads_in_objects_are_kept(
    sglang: SimulatorProcess, places: Places, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A checkpoint keeps them against the window, and the janitor; with it they go."""
    folder = tmp_path_factory.mktemp("objects")
    kept = {"TURNLOG_PAYLOADS": f"file://{folder}", "TURNLOG_PAYLOADS_KEEP_S": "0", "TURNLOG_CLOSED_REPLAY_TTL_S": "0"}
    large = {"experts": {"layers": 48, "top_k": 8, "experts": 2**31 - 1}}

    def objects() -> list[Path]:
        return [path for path in folder.rglob("*") if path.is_file() and path.parent != folder]

    with serving(places.new("checkpoints-objects"), sglang.base_url, environment={**BOTH, **kept}) as stand:
        talk = stand.talk()
        for text in ("One", "Two"):
            talk.say(text, sim=large)
        before = rows(talk)
        name = make(stand)
        for text in ("Three", "Four", "Five"):
            talk.say(text, sim=large)
        stand.http.delete(talk.path)
        other = stand.talk()
        other.say("One", sim=large)
        assert len(objects()) > 1
        stand.http.delete(other.path)
        until(lambda: other.rows(replay="true")[0]["tombstoned"])
        restore(stand, name)
        assert rows(talk) == before
        assert stand.http.delete(talk.path).status_code == 204
        assert rows(talk)[0][EXPERTS] == before[0][EXPERTS]
        delete(stand, *(one["name"] for one in stand.http.get("/checkpoints").json()["checkpoints"]))
        until(lambda: rows(talk)[0]["tombstoned"])
        erase = {"erase": "true"}
        for one in (talk, other):
            until(lambda one=one: stand.http.delete(one.path, params=erase).status_code == 204)  # type: ignore[misc]
        assert objects() == []
        assert problems(stand) == []
