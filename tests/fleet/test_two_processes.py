"""A session goes on at another process and stays with its engine."""

from __future__ import annotations

from fleet.stands import Fleet


def test_a_session_keeps_its_engine_at_both_processes(fleet: Fleet) -> None:
    first, second = fleet.apis
    talk = first.talk()
    talk.say("Hello")
    other = second.known(talk.id)
    other.messages = talk.messages
    other.say("And then?")
    engines = {url for url, _ in fleet.chats(talk.id)}
    assert len(engines) == 1
    bound = [event for event in talk.events() if event["type"] == "AffinityBound"]
    assert [event["engine"] for event in bound] == list(engines)
