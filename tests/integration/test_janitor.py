"""What time undoes: idle sessions, the payloads and then the content of closed ones, and room for new ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.looking import vacuum, value

from integration.places import Places
from integration.routing import BOTH, Session, fetched, problems, session_of
from integration.stand import FIRST_TURN, Stand, error_of, serving, until, user
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

Start = Callable[..., Stand]


@pytest.fixture
def stand_with(sglang: SimulatorProcess, places: Places) -> Iterator[Start]:
    """Starts a server with these settings."""
    with contextlib.ExitStack() as servers:

        def start(**settings: str) -> Stand:
            environment = {**BOTH, **{f"TURNLOG_{name}": value for name, value in settings.items()}}
            return servers.enter_context(serving(places.new("janitor"), sglang.base_url, environment=environment))

        yield start


def live_chunks(talk: Session) -> int:
    query = "SELECT count(*) FROM chunks WHERE session_id = :id AND data IS NOT NULL"
    return int(value(talk.stand.url, query, id=talk.id))


def refused(talk: Session) -> int:
    return int(value(talk.stand.url, "SELECT count(*) FROM refused_replies WHERE session_id = :id", id=talk.id))


def content(talk: Session) -> int:
    tables = ("turns", "blobs", "chunks", "refused_replies")
    each = " + ".join(f"(SELECT count(*) FROM {table} WHERE session_id = :id)" for table in tables)
    return int(value(talk.stand.url, f"SELECT {each}", id=talk.id))


def a_session(stand: Stand, turns: int = 2, **body: Any) -> Session:
    """A session with payloads and a refused reply."""
    talk = session_of(stand, **body)
    for number in range(turns):
        talk.say(f"Question {number}")
    assert talk.chat([*talk.messages, user("Bad")], sim={"fault": "bad_experts_base64"}).status_code == 502
    return talk


def test_an_idle_session_is_closed_and_a_busy_one_is_not(stand_with: Start) -> None:
    stand = stand_with(IDLE_CLOSE_S="1")
    idle, busy = session_of(stand), session_of(stand)
    idle.say("Hello")
    call = stand.meanwhile(busy.chat, [user("Slow")], sim={"latency_s": 2})
    until(lambda: "SessionClosed" in idle.types())
    assert idle.events()[-1]["reason"] == "idle"
    assert error_of(idle.chat([*idle.messages, user("On")])) == (410, "session_reclaimed")
    assert idle.rows()[0]["final"] is True
    assert call.result().status_code == 200
    assert busy.types() == ["SessionCreated", *FIRST_TURN]
    until(lambda: "SessionClosed" in busy.types())
    assert problems(stand) == []


def test_a_closed_sessions_payloads_are_freed_and_its_content_stays(stand_with: Start) -> None:
    stand = stand_with(CLOSED_REPLAY_TTL_S="0", CLOSED_TTL_S="off")
    talk, other, bare = (a_session(stand, retain=retain) for retain in ("window", "all", "window"))
    assert min(live_chunks(talk), refused(talk)) > 0
    [before] = talk.rows()
    for one in (talk, bare):
        stand.http.delete(one.path)
    until(lambda: live_chunks(talk) == refused(talk) == live_chunks(bare) == 0)
    until(lambda: talk.types()[-1] == "BlobsTombstoned")
    last = talk.events()[-1]
    assert (last["type"], last["reason"]) == ("BlobsTombstoned", "closed")
    [row] = talk.rows(replay="true")
    assert (row["routed_experts"], sorted(row["tombstoned"])) == (None, ["indexer_topk", "routed_experts"])
    assert (row["tokens"], row["messages"], row["final"]) == (before["tokens"], before["messages"], True)
    assert fetched(other, 2).rows.size
    assert refused(other) == 1
    assert problems(stand) == []


def test_what_was_left_by_a_server_that_died_is_freed_by_the_next(stand_with: Start) -> None:
    stand = stand_with(CLOSED_REPLAY_TTL_S="off")
    talk = a_session(stand, turns=3)
    stand.http.delete(talk.path)
    stand.server.kill()
    stand.server.environment["TURNLOG_CLOSED_REPLAY_TTL_S"] = "0"
    stand.server.start()
    until(lambda: live_chunks(talk) == refused(talk) == 0)
    assert problems(stand) == []


def test_an_idle_session_goes_through_it_all(stand_with: Start) -> None:
    stand = stand_with(IDLE_CLOSE_S="0.5", CLOSED_REPLAY_TTL_S="0.5", CLOSED_TTL_S="2")
    talk = a_session(stand)
    until(lambda: "SessionErased" in talk.types())
    types = talk.types()
    assert [kind for kind in types if kind in ("SessionClosed", "SessionErased")] == ["SessionClosed", "SessionErased"]
    assert types.index("SessionClosed") < types.index("BlobsTombstoned") < types.index("SessionErased")
    until(lambda: content(talk) == 0)
    assert problems(stand) == []


def test_past_a_size_no_session_is_created_and_others_go_on(stand_with: Start, places: Places) -> None:
    stand = stand_with(MAX_DB_BYTES=str(places.empty_bytes() + (3 << 20)), CLOSED_REPLAY_TTL_S="off")
    large = {"experts": {"layers": 48, "top_k": 8, "experts": 2**31 - 1}, "completion_tokens": 3000}
    talk, known = session_of(stand), session_of(stand, session_id="known")
    talk.say("Large", sim=large)

    def refuses() -> bool:
        response = stand.http.post("/sessions", json={})
        if response.status_code == 200:
            stand.http.delete(f"/sessions/{response.json()['session_id']}")
        return bool(response.status_code == 507)

    until(refuses)
    response = stand.http.post("/sessions", json={})
    assert error_of(response) == (507, "store_full")
    assert response.headers["retry-after"]
    header = stand.http.post("/v1/chat/completions", json={"messages": [user("Hi")]}, headers={"x-session-id": "new"})
    assert error_of(header) == (507, "store_full")
    talk.say("On", sim={**large, "completion_tokens": 20})
    known.say("On")
    assert stand.http.post("/sessions", json={"session_id": "known"}).status_code == 200
    assert stand.http.delete(talk.path, params={"erase": "true"}).status_code == 204
    vacuum(stand.url)
    until(lambda: not refuses())
    session_of(stand).say("Hello")
    assert problems(stand) == []
