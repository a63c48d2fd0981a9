"""What time undoes: idle sessions, the payloads and then the content of closed ones, and room for new ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.looking import vacuum, value

from integration.places import Places
from integration.routing import BOTH, Session, problems, session_of
from integration.stand import Stand, error_of, serving, until, user
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


def test_an_idle_session_goes_through_it_all(stand_with: Start) -> None:
    stand = stand_with(IDLE_CLOSE_S="3", CLOSED_REPLAY_TTL_S="0.5", CLOSED_TTL_S="2")
    talk = a_session(stand)
    until(lambda: "SessionErased" in talk.types())
    types = talk.types()
    assert [kind for kind in types if kind in ("SessionClosed", "SessionErased")] == ["SessionClosed", "SessionErased"]
    assert types.index("SessionClosed") < types.index("BlobsTombstoned") < types.index("SessionErased")
    until(lambda: content(talk) == 0)
    assert problems(stand) == []


def test_a_pause_of_one_run_leaves_its_idle_sessions_open_alone(stand_with: Start) -> None:
    stand = stand_with(IDLE_CLOSE_S="0.5")
    assert stand.http.post("/runs/a/fleet/pause", json={"lease_s": 60}).status_code == 200
    paused, other = session_of(stand, run="a"), session_of(stand, run="b")
    until(lambda: "SessionClosed" in other.types())
    assert "SessionClosed" not in paused.types()


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
