"""Engines come and go at run time, and every process agrees on them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fault.table import Tally
from integration.stand import Talk, error_of, held, until, user

from fleet.pausing import elsewhere
from fleet.stands import Api, Engine, Fleet
from fleet.test_affinity import bound, engines_of
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

PATIENCE_S = 60.0


class Pool:
    """A fleet whose engines a test may end, and what its processes say of them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.engines = fleet.engines
        self.apis = fleet.apis

    def shown(self, url: str, api: Api | None = None) -> dict[str, Any] | None:
        listed = (api or self.apis[0]).http.get("/engines").json()["engines"]
        return next((one for one in listed if one["url"] == url), None)

    def everywhere(self, url: str, **expected: Any) -> None:
        """Wait until all processes say so; `state=None`: that there is no such engine."""

        def agree() -> bool:
            found = [self.shown(url, api) or {"state": None} for api in self.apis]
            return all(one[name] == value for one in found for name, value in expected.items())

        until(agree, PATIENCE_S)

    def version(self) -> int:
        found: int = self.apis[0].http.get("/engines").json()["version"]
        return found

    def post(self, url: str, state: str | None = None, api: Api | None = None) -> dict[str, Any]:
        body = {"url": url} if state is None else {"url": url, "state": state}
        response = (api or self.apis[0]).http.post("/engines", json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def at_engine(self, engine: Engine, api: Api | None = None) -> Talk:
        """A session whose first turn was served by this engine."""
        for _ in range(200):
            talk = (api or self.apis[0]).talk()
            talk.say("Hello")
            if engines_of(talk) == [engine.url]:
                return talk
        raise AssertionError(f"no session of 200 was placed at {engine.url}")

    def other(self, engine: Engine) -> Engine:
        return next(one for one in self.engines if one is not engine)

    def heal(self) -> None:
        """All engines run, serve and are known to live."""
        self.fleet.reset()
        for engine in self.engines:
            engine.sim.post("/continue_generation")
            self.post(engine.url)
        for engine in self.engines:
            self.everywhere(engine.url, state="serving", health="healthy", weight_version="default")


@pytest.fixture
def pool(holding: Fleet) -> Pool:
    made = Pool(holding)
    made.heal()
    return made


def test_engines_of_the_settings_are_listed(fleet: Fleet) -> None:
    expected = {"source": "settings", "state": "serving", "health": "healthy", "dialect": "sglang", "in_flight": 0}
    expected |= dict.fromkeys(("last_error", "sessions", "weight_version_regressed"))
    expected_of = {engine.url: expected for engine in fleet.engines}

    def listed() -> dict[str, Any]:
        every = fleet.apis[1].http.get("/engines").json()["engines"]
        return {one["url"]: {name: one[name] for name in expected} for one in every}

    until(lambda: listed() == expected_of)  # as soon as each has been looked at


def test_an_engine_that_is_added_at_one_process_serves_at_the_other(pool: Pool) -> None:
    first, second = pool.apis
    with SimulatorProcess("--seed", "9", "--weight-version", "3") as third:
        url = third.base_url
        added = pool.post(f"{url}/v1/", api=first)
        assert (added["url"], added["source"], added["state"]) == (url, "admin", "serving")
        until(lambda: pool.shown(url, second))
        version = pool.version()
        pool.post(url, "serving", api=second)
        assert pool.version() == version

        for engine in pool.engines:
            pool.post(engine.url, "draining")
            pool.everywhere(engine.url, state="draining")
        talk = second.talk()
        talk.say("Hello")
        assert engines_of(talk) == [url]
        for engine in pool.engines:
            pool.post(engine.url)
            pool.everywhere(engine.url, state="serving")

        assert second.http.delete("/engines", params={"url": url}).status_code == 204
        pool.everywhere(url, state=None)
        elsewhere(first, talk).say("And now?")
        assert bound(talk)[1][1] == "listed"
        gone = first.http.request("DELETE", "/engines", json={"url": url})
        assert error_of(gone) == (404, "not_found")


@pytest.mark.parametrize("way", ["drained", "removed"])
def test_a_turn_in_flight_ends_where_it_is_and_the_next_goes_elsewhere(pool: Pool, way: str) -> None:
    second = pool.apis[1]
    leaving = pool.engines[0]
    talk = pool.at_engine(leaving)
    messages = [*talk.messages, user("Take your time")]
    with held(leaving.sim):
        turn = pool.fleet.meanwhile(talk.chat, messages)
        until(lambda: len(leaving.chats(talk.id)) == 2)
        if way == "drained":
            pool.post(leaving.url, "draining", api=second)
            pool.everywhere(leaving.url, state="draining")
        else:
            assert second.http.delete("/engines", params={"url": leaving.url}).status_code == 204
            pool.everywhere(leaving.url, state=None)
    reply: httpx.Response = turn.result()
    assert reply.status_code == 200, reply.text
    moved = elsewhere(second, talk)
    moved.messages = [*messages, reply.json()["choices"][0]["message"]]
    moved.say("And the next?")
    assert engines_of(moved) == [leaving.url, leaving.url, pool.other(leaving).url]
    assert bound(moved)[1] == (pool.other(leaving).url, "draining" if way == "drained" else "listed")
    assert len(moved.rows()) == 1


@pytest.mark.fault(6, "an engine of two is killed, and comes back")
def test_a_dead_engines_sessions_go_on_elsewhere_with_all_they_had(pool: Pool, tally: Tally) -> None:
    """What the other engine is asked is the history to the byte, and the row has every turn."""
    first, second = pool.apis
    dying = pool.engines[0]
    talk = pool.at_engine(dying)
    talk.say("A second turn, with the prefix in the cache")
    history = list(talk.messages)
    dying.process.kill()
    tally.tried += 1

    new = user("Are you still there?")
    moved = elsewhere(second, talk)
    moved.add(new)
    assert bound(moved)[1] == (pool.other(dying).url, "dead")
    (asked,) = pool.other(dying).chats(talk.id)
    assert asked["body"]["messages"] == [*history, new]
    (row,) = moved.rows()
    turns = moved.committed()
    assert [turn["turn"] for turn in turns] == [1, 2, 3]
    assert len(row["tokens"]) == turns[2]["base_tokens"] + turns[2]["suffix_tokens"] + turns[2]["output_tokens"]

    pool.everywhere(dying.url, health="dead")
    assert "cannot connect" in (pool.shown(dying.url) or {})["last_error"]
    until(lambda: first.http.get("/ready").is_success)
    elsewhere(first, moved).say("And at the other process?")
    assert engines_of(moved)[2:] == [pool.other(dying).url] * 2

    dying.process.start()
    pool.everywhere(dying.url, health="healthy", last_error=None)
    pool.at_engine(dying)
    assert len(bound(moved)) == 2
    tally.acknowledged += len(moved.committed())
    pool.fleet.processes.are_the_same()


def test_an_engine_that_is_paused_keeps_its_sessions(pool: Pool) -> None:
    """Its /health generates a token, so it hangs; the engine is not gone."""
    paused = pool.engines[1]
    talk = pool.at_engine(paused)
    assert paused.sim.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    turn = pool.fleet.meanwhile(talk.chat, [*talk.messages, user("And then?")])
    pool.everywhere(paused.url, health="busy")
    assert not turn.done()
    assert paused.sim.post("/continue_generation").status_code == 200
    talk.messages.append(user("And then?"))
    talk.messages.append(turn.result().json()["choices"][0]["message"])

    assert pool.apis[0].http.post("/fleet/pause").status_code == 200
    pool.everywhere(paused.url, health="paused")
    assert pool.apis[1].http.post("/fleet/resume").status_code == 200
    talk.say("And now?")
    assert engines_of(talk) == [paused.url] * 3
    assert len(bound(talk)) == 1


def test_without_an_engine_there_is_no_chat(pool: Pool) -> None:
    first, second = pool.apis
    talk = first.talk()
    for engine in pool.engines:
        assert first.http.delete("/engines", params={"url": engine.url}).status_code == 204
    pool.everywhere(pool.engines[0].url, state=None)
    pool.everywhere(pool.engines[1].url, state=None)
    assert error_of(elsewhere(second, talk).chat([user("Hello")])) == (503, "no_upstream")
    assert second.http.get("/ready").status_code == 503
    assert talk.types() == ["SessionCreated"]


def test_weights_that_go_backwards_are_flagged_once(pool: Pool) -> None:
    """Both processes see it; one event says so, until the version is passed or the engine is posted anew."""
    engine = pool.engines[0]
    talks = [pool.at_engine(engine, api) for api in pool.apis]

    def serve(version: str) -> None:
        for talk in talks:
            talk.say("Next", sim={"weight_version": version})

    def regressed() -> list[tuple[str, str] | None]:
        found = [(pool.shown(engine.url, api) or {})["weight_version_regressed"] for api in pool.apis]
        return [None if one is None else (one["before"], one["after"]) for one in found]

    engine.sim.post("/update_weight_version", json={"new_version": "7"})
    serve("7")
    before = pool.version()
    engine.sim.post("/update_weight_version", json={"new_version": "5"})
    serve("5")
    serve("5")
    until(lambda: regressed() == [("7", "5")] * 2, PATIENCE_S)
    assert pool.version() == before + 1
    assert [talk.committed()[-1]["dispatched"] for talk in talks] == ["5", "5"]
    engine.sim.post("/update_weight_version", json={"new_version": "8"})
    serve("8")
    assert regressed() == [None, None]

    engine.sim.post("/update_weight_version", json={"new_version": "6"})
    serve("6")
    until(lambda: regressed() == [("8", "6")] * 2, PATIENCE_S)
    pool.post(engine.url)
    until(lambda: regressed() == [None, None], PATIENCE_S)
    serve("6")
    assert regressed() == [None, None]


BAD_ENGINES: list[dict[str, Any]] = [
    {},
    *({"url": url} for url in ("", 8, "127.0.0.1:30000", "http://user:secret@engine:30000", "http://engine:30000?x=1")),
    *({"url": url} for url in ("http://engine:99999999", "http://engine\x00:30000", "http://" + "e" * 3000)),
    *({"url": "http://engine:30000", **more} for more in ({"state": "removed"}, {"state": None}, {"weight": 2})),
]


def test_what_is_no_engine_is_refused_and_a_delete_names_one(fleet: Fleet) -> None:
    http = fleet.apis[0].http
    before = http.get("/engines").json()
    for body in BAD_ENGINES:
        refused = http.post("/engines", json=body)
        assert error_of(refused) == (400, "invalid_request"), body
        assert "secret" not in refused.text
        if set(body) == {"url"}:
            assert error_of(http.request("DELETE", "/engines", json=body))[0] == 400
    after = http.get("/engines").json()
    assert [one["url"] for one in after["engines"]] == [one["url"] for one in before["engines"]]
    assert error_of(http.delete("/engines")) == (400, "invalid_request")
    both = http.request("DELETE", "/engines", params={"url": "http://a"}, json={"url": "http://b"})
    assert error_of(both) == (400, "invalid_request")
    assert error_of(http.delete("/engines", params={"url": "http://a:1"})) == (404, "not_found")
