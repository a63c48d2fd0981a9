"""The service's memory does not grow with the sessions that have been, nor with the bodies that were refused."""

from __future__ import annotations

import gc
import logging
import sqlite3
import tracemalloc
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from fault.hosted import hosted

from integration.stand import Api, until, user
from ops.simulator.process import SimulatorProcess
from tests.tools import hostile

pytestmark = pytest.mark.long

SIZE = 1 << 20
"""Of a refused body: much more than what a request leaves behind in caches and counters."""

SESSIONS = 60

LEFT = 1000
"""Bytes that a session may leave: about 200 were measured, of them 63 in pydantic-core's cache of strings, which is
bounded, and the rest metrics by the second. A name that is kept of each session is told by its container's length."""


@pytest.fixture
def traced() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # pytest keeps each record
    tracemalloc.start()
    yield
    tracemalloc.stop()
    logging.disable(logging.NOTSET)


def held() -> int:
    return tracemalloc.get_traced_memory()[0]


@pytest.fixture
def api(sqlite_url: str, sglang: SimulatorProcess, request: pytest.FixtureRequest) -> Iterator[Api]:
    settings: dict[str, Any] = getattr(request, "param", {})
    with hosted(sqlite_url, sglang.base_url, **settings) as server, closing(Api(server.base_url)) as api:
        yield api


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_a_refused_body_is_freed_without_the_collector(api: Api, uncollected: None, traced: None) -> None:
    """What only the collector frees stays until it runs in full, which is rare (`main._calm_collector`)."""
    talk = api.talk()
    talk.say("Hello")
    kept = {}
    for name, (route, body) in hostile.bodies(SIZE).items():
        small = hostile.bodies(100)[name][1]
        for sent in (small, body):  # the first imports and caches what such a request needs
            before = held()
            response = api.http.post(f"{talk.path}/{route}", content=sent)
            assert response.status_code == 400, (name, response.text)
            del response
        try:
            until(lambda before=before: held() - before < SIZE / 4, 20)
        except AssertionError:
            kept[name] = held() - before
    assert kept == {}


@pytest.mark.parametrize("api", [{"cache_bytes": 0}], indirect=True)
def test_a_session_that_has_been_leaves_nothing(api: Api, traced: None) -> None:
    live_and_die(api)
    before = {id(one): len(one) for one in containers()}
    first = held()
    live_and_die(api)
    assert (held() - first) / SESSIONS < LEFT
    grown = [one for one in containers() if len(one) - before.get(id(one), len(one)) >= SESSIONS * 7 // 10]
    assert [repr(one)[:200] for one in grown] == []


def live_and_die(api: Api) -> None:
    for number in range(SESSIONS):
        talk = api.talk()
        assert talk.chat([user("y" * 300)]).status_code == 200
        assert api.http.delete(talk.path, params={"erase": number % 4 == 0}).status_code == 204
    gc.unfreeze()
    gc.collect()


def containers() -> list[Any]:
    """All in the process that may hold a value for each session."""
    kinds = dict, list, set, deque
    # CPython's sqlite3 keeps weak references to a connection's cursors, and looks at each 200th for the dead ones.
    own = {
        id(one) for made in gc.get_objects() if isinstance(made, sqlite3.Connection) for one in gc.get_referents(made)
    }
    return [one for one in gc.get_objects() if isinstance(one, kinds) and id(one) not in own]
