"""Generations that a pause of the fleet interrupts, as tests dictate: where each is cut, and what happens meanwhile."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx

from integration.stand import HOURS, Stand, Talk, until, user

Reply = dict[str, Any]

ASKED = user("Hello there, and tell me what you think of all of this and that, and of the rest of it")
"""Long enough for the simulator, which draws the rows of payloads by the first 16 ids."""


@contextlib.contextmanager
def paused(stand: Stand) -> Iterator[None]:
    """The whole fleet, and whatever becomes of the test, nothing stays paused."""
    try:
        response = stand.http.post("/fleet/pause")
        assert response.status_code == 200, response.text
        yield
    finally:
        assert stand.http.post("/fleet/resume").status_code == 200


def latency(stand: Stand, seconds: float) -> None:
    assert stand.sim.post("/sim/latency", json={"latency_s": seconds}).status_code == 200


def generating(stand: Stand) -> Callable[[], bool]:
    """Has the engine something in hand?"""
    return lambda: bool(stand.stats()["in_flight_rids"])


def interrupted(
    stand: Stand,
    talk: Talk,
    at: Sequence[int],
    *,
    meanwhile: Callable[[int], None] = lambda number: None,
    path: str | None = None,
    **body: Any,
) -> httpx.Response:
    """A turn that the engine is told to end after so many tokens, then so many more. `meanwhile`, the gate is shut."""
    latency(stand, HOURS)
    sim = {**body.pop("sim", {}), "abort_at": list(at)}
    whole = {
        "model": "simulator",
        **({} if path else {"messages": [*talk.messages, ASKED]}),
        **body,
        "sim": sim,
    }
    turn = stand.meanwhile(stand.http.post, path or talk.chat_path, json=whole)
    for number in range(len(at)):
        until(generating(stand))
        with paused(stand):
            until(lambda: not generating(stand)())
            meanwhile(number)
            if number == len(at) - 1:
                latency(stand, 0.0)
    found: httpx.Response = turn.result()
    return found


def uncut(stand: Stand, talk: Talk, *, path: str | None = None, **body: Any) -> httpx.Response:
    """The same turn of a session that is not interrupted, by an engine that has forgotten the other one."""
    assert stand.sim.post("/sim/reset").status_code == 200
    whole = {"model": "simulator", **_asked(talk, path), **body}
    return stand.http.post(path or talk.chat_path, json=whole)


def as_said(response: httpx.Response) -> Reply:
    """A reply without what no two have in common: its id, its time, and what of its prompt was in a cache."""
    assert response.status_code == 200, response.text
    reply: Reply = copy.deepcopy(response.json())
    del reply["id"], reply["created"]
    reply["usage"].pop("prompt_tokens_details", None)
    for choice in reply["choices"]:
        for name in ("id", "cached_tokens", "e2e_latency"):
            choice.get("meta_info", {}).pop(name, None)
        for number, call in enumerate(choice.get("message", {}).get("tool_calls") or ()):
            call["id"] = number
    return reply


def budgets(stand: Stand, talk: Talk) -> list[int | None]:
    """What the engine was told to generate at most, each time."""
    return [one["body"].get("max_tokens") for one in stand.engine_requests(talk.id)]


def _asked(talk: Talk, path: str | None) -> dict[str, Any]:
    """A chat's messages; a route of its own has its prompt in the body."""
    return {} if path else {"messages": [*talk.messages, ASKED]}
