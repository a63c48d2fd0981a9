"""Sessions that SGLang's radix cache knows by an id: their KV is free once they are closed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.domain.session import engine_session_of
from integration.places import Places
from integration.stand import Stand, Talk, standing, until

ENVIRONMENT = {"TURNLOG_ENGINE_SESSION_IDS": "true"}


def deleted(stand: Stand, talk: Talk) -> None:
    assert stand.http.delete(talk.path).status_code == 204


def erased(stand: Stand, talk: Talk) -> None:
    assert stand.http.delete(talk.path, params={"erase": "true"}).status_code == 204


def killed(stand: Stand, talk: Talk) -> None:
    """The close is on disk, and the process that has to tell the engine may be dead before it does."""
    stand.sim.post("/sim/behaviour", json={"sessions_delay_s": 30.0})
    deleted(stand, talk)
    stand.server.kill()
    stand.sim.post("/sim/behaviour", json={"sessions_delay_s": 0.0})
    stand.server.start()


def idle(stand: Stand, talk: Talk) -> None:
    """The janitor closes it."""
    stand.server.stop()
    stand.server.environment["TURNLOG_IDLE_CLOSE_S"] = "1"
    stand.server.start()


@pytest.mark.long
@pytest.mark.parametrize("close", [deleted, erased, killed, idle])
def test_a_closed_sessions_engine_is_told_once(places: Places, close: Callable[[Stand, Talk], None]) -> None:
    with standing(places.new("session-ids"), environment=ENVIRONMENT) as stand:
        talk, unused = stand.talk(), stand.talk()
        name = engine_session_of(talk.id)
        for text in ("Hello", "And then?"):
            talk.say(text, session_id="chosen by the client")
        assert [one["body"]["session_id"] for one in stand.engine_requests(talk.id)] == [name, name]
        assert stand.stats()["closed_sessions"] == []
        close(stand, talk)
        until(lambda: name in stand.stats()["closed_sessions"])
        if close is not idle:
            deleted(stand, unused)
        last = stand.talk()
        last.say("Hello")
        deleted(stand, last)
        until(lambda: engine_session_of(last.id) in stand.stats()["closed_sessions"])
        assert stand.stats()["closed_sessions"] == [name, engine_session_of(last.id)], "one without a turn is not told"


def test_without_the_setting_no_engine_is_told(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello")
    deleted(stand, talk)
    assert "session_id" not in stand.engine_requests(talk.id)[0]["body"]
    assert stand.stats()["closed_sessions"] == []
