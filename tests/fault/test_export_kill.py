"""`kill -9` in the middle of an export while sessions are written: the last whole row's cursor gives the rest, once."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import httpx
import pytest
from integration.patient import answered
from integration.stand import Stand, Talk, serving, user

from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

SESSIONS = 150
CLIENTS = 4
PATIENCE_S = 30.0
MOST_KILLS = 4


@pytest.fixture(scope="module")
def filled(engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server of its own with sessions of some length, a third of them of two segments."""
    with serving(tmp_path_factory.mktemp("export-kill"), engine.base_url) as stand:
        runs = [stand.meanwhile(fill, stand, number) for number in range(SESSIONS)]
        talks = [run.result(timeout=120) for run in runs]
        yield stand, talks


def fill(stand: Stand, number: int) -> Talk:
    talk = stand.talk(on_divergence="segment", rollback_window=0, group_id=f"g{number // 4}", attempt=number)
    talk.say("Hello", sim={"completion_tokens": 300, "tool_calls": False})
    if number % 3 == 0:
        talk.messages = []
        talk.say("A summary", sim={"completion_tokens": 300, "tool_calls": False})
    assert stand.http.put(f"{talk.path}/reward", json={"reward": number}).status_code == 200
    return talk


def write(stand: Stand, talks: list[Talk]) -> int:
    """Turns of other sessions meanwhile, each insisted on until it is answered."""
    for number, talk in enumerate(talks):
        answered(stand, talk, talk.body([*talk.messages, user("More")]), PATIENCE_S, f"while-{number}")
    return len(talks)


def taken(stand: Stand, query: dict[str, Any], most: int) -> tuple[list[bytes], bool]:
    """Whole lines of an export during which the server dies, after `most` bytes; did it die?"""
    data, killed = b"", False
    with contextlib.suppress(httpx.TransportError), stand.http.stream("GET", "/export", params=query) as response:
        assert response.status_code == 200
        for piece in response.iter_raw(4096):
            data += piece
            if len(data) > most and not killed:
                stand.server.kill()
                killed = True
    if killed:
        stand.server.start()
    return data[: data.rfind(b"\n") + 1].splitlines(), killed


@pytest.mark.parametrize("shape", ["turnlog", "atropos"])
def test_the_rest_is_given_once(filled: tuple[Stand, list[Talk]], shape: str) -> None:
    stand, talks = filled
    rng = random.Random(f"{shape} true")
    writing = [stand.meanwhile(write, stand, talks[start::40]) for start in range(CLIENTS)]
    first = stand.http.get("/export", params={"limit": 1})
    query: dict[str, Any] = {"shape": shape, "explain": "true", "cursor": first.headers["x-turnlog-cursor"]}
    start, lines, kills = query["cursor"], [], 0
    cut = True
    while cut:
        most = rng.randrange(10_000, 150_000) if kills < MOST_KILLS else 1 << 40
        found, cut = taken(stand, query, most)
        kills += cut
        lines += found
        if found:
            query["cursor"] = json.loads(found[-1])["cursor"]
    for run in writing:
        assert run.result(timeout=60) > 0
    assert kills >= 2
    whole = stand.http.get("/export", params={**query, "cursor": start}).content.splitlines()
    assert lines == whole
    assert len(whole) >= (SESSIONS // 4 if shape == "atropos" else SESSIONS)
