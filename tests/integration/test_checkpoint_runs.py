"""Checkpoints of runs: a restore of one run touches nothing of another."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from integration.guarded import Guarded, Team
from integration.places import Places
from integration.routing import problems
from integration.stand import HOURS, Stand, Talk, error_of, serving, until
from integration.test_checkpoints import VOLATILE
from ops.simulator.process import SimulatorProcess


@pytest.fixture(scope="module")
def used(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    with serving(places.new("checkpoint-runs"), sglang.base_url) as made:
        yield made
        assert problems(made) == []


@pytest.fixture
def runs() -> tuple[str, str]:
    mark = uuid.uuid4().hex[:8]
    return f"ours.{mark}", f"theirs.{mark}"


def make(stand: Stand, name: str, run: str, **body: Any) -> dict[str, Any]:
    response = stand.http.post("/checkpoints", json={"name": name, "run": run, **body})
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    return made


def restore(stand: Stand, name: str, run: str) -> dict[str, Any]:
    response = stand.http.post(f"/checkpoints/{name}/restore", params={"run": run})
    assert response.status_code == 200, response.text
    done: dict[str, Any] = response.json()
    return done


def said(stand: Stand, run: str, **body: Any) -> Talk:
    talk = stand.talk(run=run, **body)
    talk.say("One")
    return talk


def handed_out(stand: Stand, run: str, consumer: str, **parameters: Any) -> list[str]:
    response = stand.http.get("/export/groups", params={"run": run, "consumer": consumer, "size": 100, **parameters})
    assert response.status_code == 200, response.text
    return [json.loads(line)["group_id"] for line in response.content.splitlines()]


def cursor(stand: Stand, **parameters: Any) -> str:
    return stand.http.get("/export", params=parameters).headers["x-turnlog-cursor"]


def exported(stand: Stand, run: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in stand.http.get("/export", params={"run": run}).content.splitlines()]
    return [{key: value for key, value in row.items() if key not in VOLATILE} for row in lines]


def continued(stand: Stand, given: str, **parameters: Any) -> int:
    return stand.http.get("/export", params={"cursor": given, **parameters}).status_code


def finish(stand: Stand, run: str, group: str) -> Talk:
    talk = said(stand, run, group_id=group)
    assert stand.http.put(f"{talk.path}/reward", json={"reward": 1.0}).status_code == 200
    assert stand.http.delete(talk.path).status_code == 204
    return talk


def test_a_restore_of_one_run_leaves_the_other_alone(used: Stand, runs: tuple[str, str]) -> None:
    """A turn at the engine, cursors, a lease, an acknowledgement, and a checkpoint of one name."""
    a, b = runs
    mine = said(used, a)
    for run in runs:
        make(used, "cut", run)
        for group in ("acked", "leased"):
            finish(used, run, group)
        assert sorted(handed_out(used, run, "c")) == ["acked", "leased"]
        acked = {"consumer": "c", "run": run, "groups": ["acked"]}
        assert used.http.post("/export/groups/ack", json=acked).json()["acknowledged"] == ["acked"]
    mine.say("Two")
    theirs = used.talk(run=b)
    slow = used.meanwhile(theirs.say, "Slow", sim={"latency_s": HOURS})
    used.until_generating(theirs)
    cursors = {run: cursor(used, **({} if run is None else {"run": run})) for run in (a, b, None)}
    position = json.loads(used.http.get("/events", params={"run": b}).content.splitlines()[-1])["position"]
    rows = exported(used, b)

    done = restore(used, "cut", a)
    assert (done["run"], done["undone"]) == (a, 2)
    assert len(mine.rows()[0]["turns"]) == 1
    assert handed_out(used, a, "c") == []
    assert [event["type"] for event in theirs.events()][-1] == "TurnOpened"
    assert exported(used, b) == rows
    assert {run: continued(used, cursors[run], **({} if run is None else {"run": run})) for run in cursors} == {
        a: 400,
        b: 200,
        None: 400,
    }
    assert "SessionRestored" not in used.http.get("/events", params={"run": b, "after": position}).text
    assert handed_out(used, b, "c") == ["leased"]
    assert handed_out(used, b, "d") == []
    leased = {"consumer": "c", "run": b, "groups": ["acked", "leased"]}
    answer = used.http.post("/export/groups/ack", json=leased).json()
    assert (answer["already"], answer["acknowledged"]) == (["acked"], ["leased"])
    used.end()
    assert slow.result().status_code == 200
    assert (theirs.generations(), theirs.types().count("TurnAbandoned")) == (1, 0)

    restore(used, done["before"], a)
    assert len(mine.rows()[0]["turns"]) == 2
    assert restore(used, "cut", b)["undone"] == 3
    assert len(mine.rows()[0]["turns"]) == 2


def test_a_checkpoint_of_all_runs_is_another_one(used: Stand, runs: tuple[str, str]) -> None:
    talks = [said(used, run) for run in runs]
    name = uuid.uuid4().hex
    given = cursor(used, run=runs[1])
    assert make(used, name, "*")["sessions"] >= 2
    assert make(used, name, runs[0])["sessions"] == 1
    for talk in talks:
        talk.say("Two")
    restore(used, name, "*")
    assert [len(talk.rows()[0]["turns"]) for talk in talks] == [1, 1]
    assert continued(used, given, run=runs[1]) == 400


def test_turns_of_one_run_drain_and_another_runs_go_on(used: Stand, runs: tuple[str, str]) -> None:
    a, b = runs
    ours, theirs = used.talk(run=a), used.talk(run=b)
    slow = used.meanwhile(ours.say, "Slow", sim={"latency_s": HOURS})
    used.until_generating(ours)
    cut = used.meanwhile(make, used, "cut", a, cut="drain")
    until(lambda: used.http.get(f"/runs/{a}/fleet").json()["held_for"] == "drain")
    assert used.http.get(f"/runs/{b}/fleet").json()["held_for"] is None
    held = used.meanwhile(used.talk(run=a).say, "Held")
    until(lambda: used.http.get(f"/runs/{a}/fleet").json()["held"] == 1)
    theirs.say("One")
    make(used, "cut", b, cut="drain")
    refused = [used.http.post("/checkpoints", json={"name": "second", "run": run, "cut": "drain"}) for run in (a, "*")]
    assert [error_of(one) for one in refused] == [(409, "checkpoint_busy")] * 2
    used.end()
    assert cut.result()["sessions"] == 2
    assert [one.result().status_code for one in (slow, held)] == [200, 200]


def test_the_list_is_filtered_by_run_and_metadata(used: Stand, runs: tuple[str, str]) -> None:
    a, b = runs
    metadata = {"step": 40, "of": {"trainer": "x"}}
    assert make(used, "one", a, metadata=metadata)["metadata"] == metadata
    for name, run in (("two", a), ("one", b), (f"one-{a}", "*")):
        assert make(used, name, run)["metadata"] is None

    def listed(**parameters: Any) -> list[tuple[str, str]]:
        found = used.http.get("/checkpoints", params=parameters).json()["checkpoints"]
        return [(one["run"], one["name"]) for one in found if one["run"] in (*runs, "*")]

    assert listed(run=a) == [(a, "one"), (a, "two")]
    assert listed(run="*")[-1:] == [("*", f"one-{a}")]
    assert listed()[-4:] == [(a, "one"), (a, "two"), (b, "one"), ("*", f"one-{a}")]
    assert listed(run=a, **{"metadata.step": 40, "metadata.of.trainer": "x"}) == [(a, "one")]
    assert listed(run=a, **{"metadata.step": 41}) == []
    refused = used.http.get("/checkpoints", params={"session": "s"})
    assert error_of(refused) == (400, "invalid_request")
    deleted = used.http.delete("/checkpoints/two", params={"run": a})
    assert (deleted.status_code, listed(run=a)) == (204, [(a, "one")])
    assert error_of(used.http.post("/checkpoints/two/restore", params={"run": b})) == (404, "not_found")


def test_an_erased_run_has_no_checkpoints(used: Stand, runs: tuple[str, str]) -> None:
    finished_one = finish(used, runs[0], "g")
    make(used, "cut", runs[0], metadata={"secret": 1})
    make(used, runs[0], "*")
    assert used.http.delete(f"/runs/{runs[0]}", params={"erase": "true"}).status_code == 204
    assert used.http.get("/checkpoints", params={"run": runs[0]}).json() == {"checkpoints": []}
    assert restore(used, runs[0], "*")["erased"] == [finished_one.id]
    said(used, runs[0])
    assert make(used, "cut", runs[0])["sessions"] == 1


def test_a_runs_token_makes_and_restores_those_of_its_run(guarded: Guarded, runs: tuple[str, str]) -> None:
    ours, theirs = (Team(guarded, run) for run in runs)
    made = theirs.session()
    assert [team.http.post("/checkpoints", json={"name": "cut"}).json()["run"] for team in (ours, theirs)] == [*runs]
    listed = ours.http.get("/checkpoints").json()["checkpoints"]
    assert [one["run"] for one in listed] == [ours.run]
    assert theirs.chat(made).status_code == 200
    assert ours.http.post("/checkpoints/cut/restore").json()["sessions"] == 0
    for run in (theirs.run, "*"):
        for refused in (
            ours.http.post("/checkpoints", json={"name": "another", "run": run}),
            ours.http.post("/checkpoints/cut/restore", params={"run": run}),
            ours.http.delete("/checkpoints/cut", params={"run": run}),
            ours.http.get("/checkpoints", params={"run": run}),
        ):
            assert error_of(refused) == (403, "forbidden")
    assert theirs.http.post("/checkpoints/cut/restore").json()["sessions"] == 1
    assert ours.http.delete("/checkpoints/cut").status_code == 204
    for team in (ours, theirs):
        team.http.close()
