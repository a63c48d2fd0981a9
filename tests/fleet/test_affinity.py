"""A session keeps its engine while it is used, wherever its turns come in."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import httpx
from integration.stand import Talk, error_of, serving, until, user

from fleet.stands import Api, Fleet

TTL_S = 1.0

HELD_S = 30.0
"""A generation that lasts until its session is closed."""


def bound(talk: Talk) -> list[tuple[str, str]]:
    """Engine and cause of each binding."""
    return [
        (event["engine"], event.get("cause", "first")) for event in talk.events() if event["type"] == "AffinityBound"
    ]


def engines_of(talk: Talk) -> list[str]:
    """The engine of each committed turn."""
    return [event["engine"] for event in talk.committed()]


def held(fleet: Fleet, api: Api) -> tuple[Talk, Future[httpx.Response]]:
    """A session whose first turn is in flight, and stays so until the session is closed."""
    talk = api.talk()
    turn = fleet.meanwhile(talk.chat, [user("Wait")], sim={"latency_s": HELD_S})
    until(lambda: fleet.chats(talk.id))
    return talk, turn


def let_go(api: Api, *held_turns: tuple[Talk, Future[httpx.Response]]) -> None:
    for talk, turn in held_turns:
        assert api.http.delete(talk.path).status_code == 204
        assert error_of(turn.result()) == (404, "session_closed")


def test_new_sessions_go_to_the_engine_with_less_in_flight_here(fleet: Fleet) -> None:
    """Six turns that begin one after the other and do not end: three at each engine, whatever their names."""
    api = fleet.apis[0]
    until(lambda: not any(one["in_flight"] for one in api.http.get("/engines").json()["engines"]))
    turns = [held(fleet, api) for _ in range(6)]
    shared_out = Counter(url for url, _ in fleet.chats())
    shown = {one["url"]: one["in_flight"] for one in api.http.get("/engines").json()["engines"]}
    let_go(api, *turns)
    assert sorted(shared_out.values()) == [3, 3]
    assert shown == shared_out


def test_a_sub_agent_begins_at_its_parents_engine(fleet: Fleet) -> None:
    """The parent was bound at the other process, whose news this one reads."""
    first, second = fleet.apis
    parents = [first.talk() for _ in range(3)]
    children = [second.talk(parent_session_id=parent.id) for parent in parents]
    for parent, child in zip(parents, children, strict=True):
        assert second.http.get(parent.path).status_code == 200  # cached there, still without an engine
        parent.say("Hello")
        blocker = held(fleet, second) if parent is parents[0] else None
        child.say("You are a sub-agent")
        if blocker is not None:
            let_go(second, blocker)
    assert [bound(child) for child in children] == [bound(parent) for parent in parents]


def test_the_routing_key_is_the_session_whatever_the_client_sends(fleet: Fleet) -> None:
    """Behind one URL that is a router's, this is what keeps the session at its engine."""
    talk = fleet.apis[0].talk()
    talk.say("Hello", headers={"X-SMG-Routing-Key": "mine"})
    talk.say("And then?")
    assert [seen["headers"]["x-smg-routing-key"] for _, seen in fleet.chats(talk.id)] == [talk.id] * 2


def test_a_session_that_is_not_used_for_the_time_to_live_is_placed_anew(fleet: Fleet, tmp_path: Path) -> None:
    """It goes to the engine that has less to do by then."""
    urls = [engine.url for engine in fleet.engines]
    with serving(tmp_path, *urls, environment={"TURNLOG_AFFINITY_TTL_S": str(TTL_S)}) as stand:
        talk = stand.talk()
        talk.say("Hello")
        [home] = engines_of(talk)
        blocking: list[tuple[Talk, Future[httpx.Response]]] = []
        while not any(url == home for other, _ in blocking for url, _ in fleet.chats(other.id)):
            blocking.append(held(fleet, stand))
        *elsewhere, there = blocking
        let_go(stand, *elsewhere)
        time.sleep(TTL_S * 1.2)
        talk.say("Back again")
        let_go(stand, there)
        assert engines_of(talk)[1] != home
        assert [cause for _, cause in bound(talk)] == ["first", "expired"]
