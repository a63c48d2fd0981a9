"""Followed logs and samples count as bytes in flight, and followed logs have a largest number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault.hosted import Hosted, hosted

from app.api.replies import FOLLOWER_BYTES
from integration.places import Place
from integration.stand import Api, Talk, error_of, until
from ops.simulator.process import SimulatorProcess


@pytest.fixture
def server(tmp_path: Path, sglang: SimulatorProcess) -> Iterator[Hosted]:
    with Place(tmp_path).database() as url, hosted(url, sglang.base_url) as made:
        yield made


@pytest.fixture
def api(server: Hosted) -> Iterator[Api]:
    with contextlib.closing(Api(server.base_url)) as made:
        yield made


FOLLOW = {"params": {"follow": "true"}}


def asks(talk: Talk) -> list[tuple[str, str, dict[str, Any]]]:
    return [("GET", f"{talk.path}/events", FOLLOW), ("GET", "/events", FOLLOW), ("POST", f"{talk.path}/samples", {})]


@contextlib.contextmanager
def followed(api: Api, talk: Talk) -> Iterator[None]:
    """One log of each kind, of which the first lines have come."""
    with contextlib.ExitStack() as stack:
        for method, path, more in asks(talk)[:2]:
            reply = stack.enter_context(api.http.stream(method, path, **more))
            pieces = stack.enter_context(contextlib.closing(reply.iter_bytes()))  # type: ignore[type-var]
            assert (reply.status_code, bool(next(pieces))) == (200, True)
        yield


def require_refused(api: Api, method: str, path: str, more: dict[str, Any]) -> None:
    refused = api.http.request(method, path, **more)
    assert error_of(refused) == (503, "overloaded"), path
    assert refused.headers["retry-after"] == "1"


def test_the_memory_of_followers_and_samples_is_limited(server: Hosted, api: Api) -> None:
    memory = server.services.inflight
    talk = api.talk()
    talk.say("Hello")
    with followed(api, talk):
        until(lambda: memory.size == 2 * FOLLOWER_BYTES)
        memory.limit = memory.size
        for ask in asks(talk):
            require_refused(api, *ask)
    until(lambda: memory.size == 0)
    assert api.http.post(f"{talk.path}/samples").status_code == 200
    until(lambda: memory.size == 0)


def test_so_many_logs_are_followed_and_no_more(server: Hosted, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.sessions.event_log.MOST_FOLLOWERS", 2)
    talk = api.talk()
    with followed(api, talk):
        for ask in asks(talk)[:2]:
            require_refused(api, *ask)
        assert api.http.get(f"{talk.path}/events").status_code == 200
    until(lambda: server.services.followers.open == 0)
    with followed(api, talk):
        assert server.services.followers.open == 2
