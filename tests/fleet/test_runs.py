"""A run has engines and gates of its own, and nothing of it comes to another run's."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from helpers.databases import Postgres
from integration.stand import Talk, error_of, until, user

from fleet.pausing import SLOW_S, finish, order, speaking, until_generating
from fleet.stands import Engine, Fleet, fleet_of

ORDERS = ("/pause_generation", "/continue_generation", "/abort_request")


class Runs:
    """Three engines: one of run `a`, one of `b`, and one that serves all others."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.a, self.b, self.shared = fleet.engines
        self.first, self.second = fleet.apis
        self.restore()

    def restore(self) -> None:
        """Each engine serves its own run again, which a test may have changed."""
        serving = {one["url"]: (one["run"], one["state"]) for one in self.first.get("/engines")["engines"]}
        for run, engine in (("a", self.a), ("b", self.b)):
            if serving.get(engine.url) != (run, "serving"):
                self.give(engine, run)

    def give(self, engine: Engine, run: str) -> None:
        """Every process knows it when this returns."""
        self.first.http.delete("/engines", params={"url": engine.url})
        assert order(self.first, "/engines", url=engine.url, run=run)["run"] == run
        until(lambda: engine.url in [one["url"] for one in self.second.get("/engines", run=run)["engines"]])

    def told(self) -> dict[str, set[str]]:
        """The orders that each engine got, and the sessions whose turns it did."""
        named = {"a": self.a, "b": self.b, "shared": self.shared}
        return {name: {one["path"] for one in engine.seen()} & set(ORDERS) for name, engine in named.items()}

    def engine_of(self, talk: Talk) -> set[str]:
        return {url for url, _ in self.fleet.chats(talk.id)}


@pytest.fixture(scope="module")
def runs_of_all(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with postgres.database() as url, fleet_of(tmp_path_factory.mktemp("runs"), url, engines=3) as made:
        yield Runs(made)


@pytest.fixture
def runs(runs_of_all: Runs) -> Runs:
    if not runs_of_all.a.process.answers():  # A test has ended it.
        runs_of_all.a.process.start()
    runs_of_all.fleet.reset()
    runs_of_all.restore()
    return runs_of_all


def generating(runs: Runs, run: str, api: int = 0, **fields: Any) -> tuple[Talk, Future[httpx.Response]]:
    talk = runs.fleet.apis[api].talk(run=run, **fields)
    turn = speaking(runs.fleet, talk, sim={"latency_s": SLOW_S})
    until_generating(runs.fleet, talk)
    return talk, turn


def test_turns_of_a_run_go_to_its_own_engines_at_every_process(runs: Runs) -> None:
    for api in runs.fleet.apis:
        for run, engine in (("a", runs.a), ("b", runs.b), ("c", runs.shared), (None, runs.shared)):
            talk = api.talk(**({} if run is None else {"run": run}))
            for text in ("Hello", "And then?"):
                talk.say(text)
            child = api.talk(parent_session_id=talk.id)
            child.say("You are a sub-agent")
            assert runs.engine_of(talk) == runs.engine_of(child) == {engine.url}
        shown = {one["url"]: one["run"] for one in api.get("/engines")["engines"]}
        assert shown == {runs.a.url: "a", runs.b.url: "b", runs.shared.url: None}
        for run, engine in (("a", runs.a), ("c", runs.shared)):
            assert [one["url"] for one in api.get("/engines", run=run)["engines"]] == [engine.url]
            named = api.http.get("/workers", headers={"x-turnlog-run": run}).json()
            assert [one["url"] for one in named["workers"]] == [engine.url]


@pytest.mark.parametrize("how", ["drained", "removed"])
def test_a_run_whose_engine_is_gone_goes_to_no_other(runs: Runs, how: str) -> None:
    run = uuid.uuid4().hex
    runs.give(runs.a, run)
    talk = runs.first.talk(run=run)
    talk.say("Hello")
    if how == "drained":
        order(runs.second, "/engines", url=runs.a.url, state="draining")
        until(lambda: runs.first.get("/engines", run=run)["engines"][0]["state"] == "draining")
        assert talk.say("And then?").status_code == 200
    else:
        assert runs.second.http.delete("/engines", params={"url": runs.a.url}).status_code == 204
        until(lambda: not runs.first.get("/engines", run=run)["engines"])
        for api in runs.fleet.apis:
            refused = api.known(talk.id).chat([user("Once more")])
            assert error_of(refused) == (503, "no_upstream")
            assert run in refused.text
        assert order(runs.first, "/engines", url=runs.a.url)["run"] == run, "it is brought back as it was"
        assert talk.say("And then?").status_code == 200
    assert runs.engine_of(talk) == {runs.a.url}


def test_an_engine_is_removed_before_it_serves_another_run(runs: Runs) -> None:
    runs.give(runs.a, "a")
    for other in ("b", None):
        assert error_of(runs.first.http.post("/engines", json={"url": runs.a.url, "run": other})) == (
            409,
            "run_mismatch",
        )
    for path, url in (("a b", runs.a.url), ("", runs.a.url)):
        assert error_of(runs.first.http.post("/engines", json={"url": url, "run": path})) == (400, "invalid_request")
    gone = runs.first.http.delete("/engines", params={"url": runs.b.url, "run": "a"})
    assert error_of(gone) == (404, "not_found")


def test_a_turn_that_waited_while_its_engine_was_given_away_does_not_follow_it(runs: Runs) -> None:
    """It had been about to go there when the gate shut."""
    runs.give(runs.a, "before")
    talk, turn = generating(runs, "before", on_abort="continue")
    order(runs.first, "/runs/before/fleet/pause")
    until(lambda: order(runs.first, "/runs/before/fleet/pause")["held"] == 1)
    runs.give(runs.a, "after")
    runs.fleet.reset()
    order(runs.first, "/runs/before/fleet/resume")
    until(lambda: runs.engine_of(talk))
    assert runs.engine_of(talk) == {runs.shared.url}
    runs.first.http.delete(f"/sessions/{talk.id}")
    assert error_of(turn.result()) == (404, "session_closed")


def test_a_pause_of_one_run_leaves_the_others_alone(runs: Runs) -> None:
    runs.give(runs.a, "a")
    _, our_turn = generating(runs, "a", api=1)
    others = [generating(runs, run) for run in ("b", "c")]
    runs.first.talk(run="b").say("Hello")
    gate = order(runs.first, "/runs/a/fleet/pause")
    assert (gate["paused"], gate["paused_runs"], list(gate["engines"])) == (True, ["a"], [runs.a.url])
    assert finish(our_turn.result()) == "abort"
    until(lambda: all(api.get("/runs/a/fleet")["paused"] for api in runs.fleet.apis))
    held = [speaking(runs.fleet, api.talk(run="a")) for api in runs.fleet.apis]
    until(lambda: all(api.get("/runs/a/fleet")["held"] == 1 for api in runs.fleet.apis))
    for api in runs.fleet.apis:
        for run in ("b", "c", "default"):
            api.talk(run=run).say("Hello")
        assert api.get("/fleet")["paused"] is False
        assert api.get("/fleet")["paused_runs"] == ["a"]
        assert api.get("/runs/b/fleet")["held"] == 0
        told = {run: api.http.get("/is_paused", headers={"x-turnlog-run": run}).json() for run in ("a", "b")}
        assert told == {"a": {"is_paused": True}, "b": {"is_paused": False}}
    with_all = order(runs.second, "/fleet/pause", mode="in_place")
    assert len(with_all["engines"]) == 3
    order(runs.second, "/fleet/resume")
    assert runs.told() == {
        "a": {"/pause_generation"},
        "b": {"/pause_generation", "/continue_generation"},
        "shared": {"/pause_generation", "/continue_generation"},
    }
    assert not any(turn.done() for turn in held)
    order(runs.second, "/runs/a/fleet/resume", version="7")
    assert [finish(turn.result()) for turn in held] == ["stop", "stop"]
    assert runs.first.get("/runs/a/fleet")["weight_version"] == "7"
    assert runs.first.get("/fleet")["weight_version"] is None
    for talk, turn in others:
        assert not turn.done()
        runs.first.http.delete(talk.path)


def test_of_an_engine_that_several_runs_share_one_runs_turns_alone_are_held(runs: Runs) -> None:
    _, our_turn = generating(runs, "c", api=1)
    other, other_turn = generating(runs, "d")
    paused = runs.first.http.post("/pause_generation", headers={"x-turnlog-run": "c"})
    assert paused.json()["engines"][runs.shared.url]["aborted"] == 1
    assert finish(our_turn.result()) == "abort"
    held = speaking(runs.fleet, runs.second.talk(run="c"))
    until(lambda: runs.second.get("/runs/c/fleet")["held"] == 1)
    assert runs.told() == {"a": set(), "b": set(), "shared": {"/abort_request"}}
    refused = runs.first.http.post("/update_weights_from_disk", json={}, headers={"x-turnlog-run": "c"})
    assert error_of(refused) == (400, "unsupported")
    runs.first.http.post("/continue_generation", headers={"x-turnlog-run": "c"})
    no_name = runs.first.http.post("/pause_generation", headers={"x-turnlog-run": ".."})
    assert error_of(no_name) == (400, "invalid_request")
    assert finish(held.result()) == "stop"
    assert not other_turn.done()
    runs.first.http.delete(other.path)


def test_an_adapter_of_a_run_is_not_that_of_another(runs: Runs) -> None:
    runs.give(runs.a, "a")
    turns = {run: generating(runs, run, adapter="lora") for run in ("a", "b")}
    paused = order(runs.second, "/runs/a/adapters/lora/pause", lease_s=3600)
    assert (paused["count"], list(paused["engines"])) == (1, [runs.a.url])
    assert finish(turns["a"][1].result()) == "abort"
    assert not turns["b"][1].done()
    assert runs.told()["b"] == set()
    assert [one["name"] for one in runs.first.get("/runs/a/adapters")["adapters"]] == ["lora"]
    assert error_of(runs.first.http.get("/adapters/lora")) == (404, "not_found")
    held = speaking(runs.fleet, runs.first.talk(run="a", adapter="lora"))
    until(lambda: runs.first.get("/runs/a/adapters/lora")["held"] == 1)
    runs.first.talk(run="a").say("Hello")
    order(runs.first, "/runs/a/adapters/lora/resume", version="3")
    finish(held.result())
    runs.first.http.delete(turns["b"][0].path)


def test_a_forgotten_pause_of_a_run_ends(runs: Runs) -> None:
    runs.give(runs.a, "a")
    order(runs.first, "/runs/a/fleet/pause", lease_s=0.3, mode="in_place")
    runs.second.talk(run="a").say("Hello")
    assert runs.told()["a"] == {"/pause_generation", "/continue_generation"}
    assert runs.told()["b"] == set()


def test_a_run_whose_engine_dies_goes_to_no_other(runs: Runs) -> None:
    runs.give(runs.a, "a")
    _, turn = generating(runs, "a", on_abort="continue")
    runs.a.process.stop()
    assert error_of(turn.result()) == (502, "upstream_unreachable")
    for api in runs.fleet.apis:
        assert error_of(api.talk(run="a").chat([user("Hello")])) == (502, "upstream_unreachable")
        api.talk(run="b").say("Hello")
    assert [len(engine.chats()) for engine in (runs.b, runs.shared)] == [2, 0]
