"""Forks: sessions that begin after a turn of another one, and go on like any other."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from integration.places import Places
from integration.routing import BOTH, problems
from integration.stand import WEATHER, Stand, Talk, error_of, serving, user
from ops.simulator.process import SimulatorProcess


@pytest.fixture(scope="module")
def used(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    environment = {**BOTH, "TURNLOG_MOE_LAYERS": "4", "TURNLOG_MOE_TOPK": "2"}
    with serving(places.new("fork"), sglang.base_url, environment=environment) as made:
        yield made
        assert problems(made) == []


def ask(stand: Stand, source: Talk, *, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"idempotency-key": key}
    return stand.http.post(f"{source.path}/fork", json=body, headers=headers)


def forks(stand: Stand, source: Talk, **body: Any) -> list[Talk]:
    """The new sessions, each with the history that its client knows."""
    response = ask(stand, source, **body)
    assert response.status_code == 200, response.text
    made = response.json()["sessions"]
    assert [one["base_url"] for one in made] == [f"/sessions/{one['session_id']}/v1" for one in made]
    return [stand.known(one["session_id"]) for one in made]


def said(stand: Stand, count: int, **body: Any) -> Talk:
    """A session of `count` turns, with tools from its second on."""
    talk = stand.talk(**body)
    for number in range(1, count + 1):
        tools = {} if number == 1 else {"tools": [WEATHER]}
        talk.say(f"Turn {number}", temperature=number / 10, sim={"tool_calls": False}, **tools)
    return talk


def go_on(talk: Talk, source: Talk, turn: int, text: str) -> None:
    talk.messages = source.messages[: 2 * turn]
    talk.say(text, tools=[WEATHER], sim={"tool_calls": False})


def test_forks_begin_with_their_parents_tokens_and_train_only_their_own(used: Stand) -> None:
    source = said(used, 4, group_id=(group := uuid.uuid4().hex), metadata={"task": 1})
    made = forks(used, source, turn=2, count=2)
    for nth, fork in enumerate(made):
        go_on(fork, source, 2, f"Another way {nth}")
    [row] = source.rows(replay="true")
    start = row["turns"][1]["end"]
    assert row["loss_mask"] == row["sampled_mask"]
    for fork in made:
        [own] = fork.rows(replay="true")
        assert own["tokens"][:start] == row["tokens"][:start]
        assert own["logprobs"][:start] == row["logprobs"][:start]
        assert own["sampled_mask"][:start] == row["sampled_mask"][:start]
        assert not any(own["loss_mask"][:start])
        assert own["loss_mask"][start:] == own["sampled_mask"][start:]
        assert sum(own["loss_mask"]) == fork.committed()[2]["output_tokens"]
        assert own["turns"][:2] == row["turns"][:2]
        assert own["weight_versions"][:start] == row["weight_versions"][:start]
        assert (own["group_id"], own["metadata"], own["rollout_id"]) == (group, {"task": 1}, fork.id)
        assert [event["base_tokens"] for event in fork.committed()][2] == start
        assert own["segment"] == 0
        records = zip(fork.state()["records"], source.state()["records"][:2], strict=False)
        for mine, theirs in records:
            assert (mine["request"], mine["turn"]) == (theirs["request"], theirs["turn"])
            assert mine["response"]["choices"] == theirs["response"]["choices"]
    assert row == source.rows(replay="true")[0]
