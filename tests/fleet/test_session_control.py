"""`nvext.session_control` at two API processes, with engines that hold sessions of their own."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from integration.stand import HOURS, Talk, error_of, until, user

from fleet.pausing import elsewhere
from fleet.stands import Api, Engine, Fleet

OPEN, CLOSE = "/open_session", "/close_session"

PATIENCE_S = 60.0


class Named:
    """One name for affinities, and what the engines were told of it."""

    def __init__(self, fleet: Fleet) -> None:
        self.id = f"control-{uuid.uuid4().hex[:12]}"
        self._fleet = fleet

    def control(self, action: str | None = None, **fields: Any) -> dict[str, Any]:
        said = {"session_id": self.id, **fields} | ({} if action is None else {"action": action})
        return {"session_control": said}

    def say(
        self,
        talk: Talk,
        action: str | None = None,
        *,
        at: Api | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> str:
        """A turn that must succeed, by its own process or another; the engine that it went to."""
        there = talk if at is None else elsewhere(at, talk)
        lasts = {} if timeout is None else {"timeout": timeout}
        there.say("Hello", nvext=self.control(action, **lasts), **fields)
        talk.messages = there.messages
        engine: str = talk.committed()[-1]["engine"]
        return engine

    def told(self, path: str | None = None) -> list[dict[str, Any]]:
        """What the engines were told of the name, in the order of arrival, with the engine's URL."""
        found = [
            {**one, "engine": engine.url}
            for engine in self._fleet.engines
            for way in ([path] if path else [OPEN, CLOSE])
            for one in engine.seen(way)
            if one["body"]["session_id"] == self.id
        ]
        return sorted(found, key=lambda one: one["arrived"])

    def paths(self) -> list[str]:
        return [one["path"] for one in self.told()]

    def closed(self) -> dict[str, Any]:
        """The one word that the name's session has ended."""
        until(lambda: self.told(CLOSE), PATIENCE_S)
        (found,) = self.told(CLOSE)
        return found


def bindings(talk: Talk) -> list[tuple[str, str | None, str | None]]:
    return [
        (event["engine"], event.get("cause"), event.get("control"))
        for event in talk.events()
        if event["type"] == "AffinityBound"
    ]


def behave(fleet: Fleet, **behaviour: Any) -> None:
    for engine in fleet.engines:
        assert engine.sim.post("/sim/behaviour", json=behaviour).status_code == 200


@contextlib.contextmanager
def killed(fleet: Fleet, url: str) -> Iterator[None]:
    """Without this engine; afterwards it is back, as a new process, where it was."""
    lost = fleet.engine(url)
    fleet.engines.remove(lost)
    lost.process.kill()
    lost.sim.close()
    try:
        yield
    finally:
        fleet.engines.append(Engine(lost.process.start()))
        until(lambda: all(shown(api, url)["health"] == "healthy" for api in fleet.apis), PATIENCE_S)


def shown(api: Api, url: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in api.http.get("/engines").json()["engines"] if one["url"] == url)
    return found


def test_open_comes_before_the_first_turn_and_later_turns_go_there(holding: Fleet) -> None:
    first, second = holding.apis
    name, talk = Named(holding), first.talk()
    engine = name.say(talk, "open", timeout=120)
    (opened,) = name.told()
    ((_, chat),) = holding.chats(talk.id)
    assert (opened["path"], opened["engine"], opened["answered"] < chat["arrived"]) == (OPEN, engine, True)
    assert {key: opened["body"][key] for key in ("session_id", "timeout")} == {"session_id": name.id, "timeout": 150}
    assert isinstance(opened["body"]["capacity_of_str_len"], int)
    assert [name.say(talk, at=second), name.say(talk, "bind"), name.say(talk, "open", at=second)] == [engine] * 3
    assert name.say(second.talk()) == engine
    assert name.paths() == [OPEN]
    assert bindings(talk) == [(engine, "control", name.id)]
    sent = [one["body"] for _, one in holding.chats(talk.id)]
    assert not any(field in one for one in sent for field in ("nvext", "session_params", "session_id"))
    assert {turn["params"] for turn in talk.committed()} == {0}


def test_a_request_may_be_of_the_session_that_its_control_names(holding: Fleet) -> None:
    name, api = Named(holding), holding.apis[0]
    body = {"model": "simulator", "messages": [user("Hello")], "nvext": name.control("open")}
    assert api.http.post("/v1/chat/completions", json=body).status_code == 200
    talk = api.known(name.id)
    assert talk.types() == ["SessionCreated", "TurnOpened", "AffinityBound", "TurnCommitted"]
    nobody = api.http.post("/v1/chat/completions", json={**body, "nvext": {"priority": 3}})
    assert error_of(nobody) == (400, "invalid_request")


def test_a_failed_open_fails_the_turn_and_leaves_no_binding(holding: Fleet) -> None:
    first, second = holding.apis
    name, talk = Named(holding), first.talk()
    behave(holding, sessions="error")
    refused = talk.chat([user("Hello")], nvext=name.control("open"))
    assert error_of(refused) == (502, "session_open_failed")
    assert name.paths() == [OPEN]
    assert holding.chats() == []
    assert talk.types() == ["SessionCreated", "TurnOpened", "TurnRejected"]
    behave(holding, sessions="ok")
    name.say(talk, at=second)
    assert [control for _, _, control in bindings(talk)] == [None]
    engine = name.say(talk, "open")
    assert [one["path"] for one in name.told()] == [OPEN, OPEN]
    assert bindings(talk)[-1] == (engine, "control", name.id)


def test_a_name_is_a_runs_own(holding: Fleet) -> None:
    """Where two runs use one name, each has its own binding and its own session at the engine."""
    first, second = holding.apis
    name, talks = Named(holding), [api.talk(run=run) for api, run in ((first, "one"), (second, "two"), (first, None))]
    engines = [name.say(talk, "open") for talk in talks]
    told = [one["body"]["session_id"] for engine in holding.engines for one in engine.seen(OPEN)]
    assert (len(told), len(set(told)), name.id in told) == (3, 3, True)
    assert [bindings(talk) for talk in talks] == [[(engine, "control", name.id)] for engine in engines]
    name.say(talks[0], "close")
    until(lambda: [one for engine in holding.engines for one in engine.seen(CLOSE)], PATIENCE_S)
    assert [name.say(talk) for talk in talks[1:]] == engines[1:]
    assert [len(bindings(talk)) for talk in talks] == [1, 1, 1]
    assert name.paths() == [OPEN]


def test_bind_is_affinity_alone(holding: Fleet) -> None:
    first, second = holding.apis
    name, talk = Named(holding), first.talk()
    engine = name.say(talk, "bind")
    assert [name.say(second.talk()) for _ in range(4)] == [engine] * 4
    name.say(talk, "close")
    assert name.told() == []
    assert talk.types()[-2:] == ["AffinityReleased", "TurnCommitted"]


def test_an_operator_must_allow_engines_to_hold_sessions(fleet: Fleet) -> None:
    name, talk = Named(fleet), fleet.apis[0].talk()
    engine = name.say(talk, "open")
    assert name.say(fleet.apis[1].talk()) == engine
    name.say(talk, "close")
    assert name.told() == []


def test_close_unbinds_at_once_and_tells_the_engine_after_the_last_byte(holding: Fleet) -> None:
    first, second = holding.apis
    name, talk, other = Named(holding), first.talk(), second.talk()
    engine = name.say(talk, "open")
    turn = holding.meanwhile(name.say, talk, "close", sim={"latency_s": 1.0})
    until(lambda: len(holding.chats(talk.id)) == 2)
    name.say(other)
    assert [control for _, _, control in bindings(other)] == [None]
    assert turn.result() == engine
    closed = name.closed()
    last = holding.engine(engine).chats(talk.id)[-1]
    assert (closed["engine"], closed["arrived"] > last["answered"]) == (engine, True)
    assert talk.types()[-2:] == ["AffinityReleased", "TurnCommitted"]
    name.say(talk, "close")
    time.sleep(0.5)
    assert name.paths() == [OPEN, CLOSE]


def test_close_is_told_once_though_the_client_has_gone(holding: Fleet) -> None:
    """The turn is cut off, and its generation aborted, before the engine is told that the session has ended."""
    name, talk = Named(holding), holding.apis[0].talk()
    name.say(talk, "open")
    body = talk.body([*talk.messages, user("Bye")], nvext=name.control("close"), sim={"latency_s": HOURS})
    with contextlib.closing(HTTPConnection(urlsplit(holding.apis[0].base_url).netloc)) as client:
        client.request("POST", talk.chat_path, json.dumps(body), {"content-type": "application/json"})
        until(lambda: len(holding.chats(talk.id)) == 2)
    closed = name.closed()
    (aborted,) = [one for engine in holding.engines for one in engine.seen("/abort_request")]
    assert aborted["arrived"] < closed["arrived"]
    assert len(talk.committed()) == 1
    time.sleep(0.5)
    assert name.paths() == [OPEN, CLOSE]


def test_a_closed_session_takes_its_engines_session_with_it(holding: Fleet) -> None:
    first, second = holding.apis
    name, talk = Named(holding), first.talk()
    name.say(talk, "open")
    assert second.http.delete(talk.path).status_code == 204
    name.closed()
    running, other = Named(holding), first.talk()
    turn = holding.meanwhile(other.chat, [user("Hello")], nvext=running.control("open"), sim={"latency_s": 30.0})
    until(lambda: holding.chats(other.id))
    assert first.http.delete(other.path).status_code == 204
    assert error_of(turn.result()) == (404, "session_closed")
    running.closed()


def test_what_an_engine_still_has_of_the_name_is_opened_anew(holding: Fleet) -> None:
    name, talk = Named(holding), holding.apis[0].talk()
    for engine in holding.engines:
        left = {"capacity_of_str_len": 1, "session_id": name.id}
        assert engine.sim.post(OPEN, json=left).status_code == 200
    url = name.say(talk, "open")
    assert [one["path"] for one in name.told() if one["engine"] == url] == [OPEN, OPEN, CLOSE, OPEN]
    assert shown(holding.apis[0], url)["sessions"] is True


def test_a_lost_engine_is_replaced_and_the_next_turn_is_the_same_there(holding: Fleet) -> None:
    first, second = holding.apis
    name, talk = Named(holding), first.talk()
    lost = name.say(talk, "open")
    name.say(talk)
    with killed(holding, lost):
        engine = name.say(talk, at=second)
        assert engine != lost
        (opened,) = name.told()
        (chat,) = holding.engine(engine).chats(talk.id)
        assert (opened["engine"], opened["answered"] < chat["arrived"]) == (engine, True)
        assert chat["body"]["messages"] == talk.messages[:-1]
        assert bindings(talk) == [(lost, "control", name.id), (engine, "dead", name.id)]
        assert name.say(talk) == engine
    assert name.say(talk) == engine
    assert name.paths() == [OPEN]


def test_an_engine_without_sessions_is_asked_once_and_again_after_its_restart(holding: Fleet) -> None:
    api, engine = holding.apis[0], holding.engines[0]
    engine.sim.post("/sim/behaviour", json={"sessions": "missing"})

    def there() -> tuple[Named, Talk]:
        """A name that is bound to this engine."""
        while True:
            name, talk = Named(holding), api.talk()
            if name.say(talk, "open") == engine.url:
                return name, talk

    (first, talk), (second, _) = there(), there()
    assert (first.paths(), second.paths()) == ([OPEN], [])
    assert holding.processes.servers[0].log_path.read_text().count(f"{engine.url} does not support sessions") == 1
    assert shown(api, engine.url)["sessions"] is False
    assert first.say(talk) == engine.url
    assert first.say(talk, "close") == engine.url
    assert first.paths() == [OPEN]
    with killed(holding, engine.url):
        second.say(api.talk())
    until(lambda: shown(api, engine.url)["sessions"] is None, PATIENCE_S)
    again, _ = there()
    assert again.paths() == [OPEN]
    assert shown(api, engine.url)["sessions"] is True
