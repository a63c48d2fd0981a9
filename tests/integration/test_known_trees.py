"""A session of long requests, which are known by their bytes, becomes the tree that one of short requests does, also
where the client spells replies otherwise."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from app.domain.known_body import LONG_BODY
from integration.stand import Stand, serving
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

LONG = "lorem, [ipsum] é \n" * (LONG_BODY // 16)
STEPS = 25

History = list[tuple[str, str]]
"""Roles and texts."""

THOUGHT = "<think>\nhm\n</think>\n\n"
"""Before every other reply."""


class Wire(NamedTuple):
    path: str
    system: str
    needed: dict[str, Any]


WIRES = {
    "messages": Wire("/v1/messages", "system", {"model": "simulator", "max_tokens": 100}),
    "responses": Wire("/v1/responses", "instructions", {"model": "simulator"}),
}


def spoken(protocol: str, history: History, marks: int) -> dict[str, Any]:
    """The history as a client sends it; `marks` of its last messages have Claude Code's mark."""
    if protocol == "responses":
        kinds = {"user": "input_text", "assistant": "output_text"}
        return {
            "input": [
                {"type": "message", "role": role, "content": [{"type": kinds[role], "text": text}]}
                for role, text in history
            ]
        }
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in history]
    for message in messages[len(messages) - marks :]:
        message["content"][0]["cache_control"] = {"type": "ephemeral"}  # type: ignore[index]
    return {"messages": messages}


def respelled(chance: random.Random, history: History) -> History:
    """As a client sends it that strips the reasoning of some replies, and spaces that of others otherwise."""
    ways = (THOUGHT, "", "<think>\n\nhm\n</think>", "hm</think>\n")
    return [
        (role, text.replace(THOUGHT, chance.choice(ways)) if role == "assistant" else text) for role, text in history
    ]


def next_request(chance: random.Random, histories: Sequence[History], step: int) -> History:
    """One that goes on, or back, repeats, or forks one of the last histories."""
    history = list(histories[-1] if chance.random() < 0.5 else chance.choice(histories[-4:]))
    if chance.random() < 0.25:
        history = history[: max(1, len(history) - chance.randint(1, 6))]
    if history[-1][0] == "assistant" or chance.random() < 0.1:
        history.append(("user", f"and {step}" + "y" * chance.choice([0, 400])))
    return history


def play(stand: Stand, protocol: str, seed: int, first: str, *, respells: bool = False) -> tuple[list[Any], str]:
    """The session's tree, and its rows' messages, after some requests; `first` is the first message."""
    chance, spelling, wire = random.Random(seed), random.Random(seed), WIRES[protocol]
    talk = stand.talk(history="tree")
    histories: list[History] = [[("user", first)]]
    for step in range(STEPS):
        history = next_request(chance, histories, step)
        front = {"metadata": {"step": f"{step * chance.randint(0, 1)}"}} if chance.random() < 0.5 else {}
        system = chance.choice(["be brief"] * 6 + ["be long"])
        sent = respelled(spelling, history) if respells else history
        body = {**front, **spoken(protocol, sent, chance.randint(0, 2)), wire.system: system, **wire.needed}
        body |= {"temperature": 0.5} if chance.random() < 0.3 else {}
        said = json.dumps({**body, "sim": {"text": f"{THOUGHT * (step % 2)}r {step}"}}, ensure_ascii=False).encode()
        reply = stand.http.post(talk.path + wire.path, content=said, headers={"content-type": "application/json"})
        assert reply.status_code == 200, reply.text
        found = reply.json()
        blocks = found["content"] if protocol == "messages" else found["output"][-1]["content"]
        histories.append([*history, ("assistant", "".join(block["text"] for block in blocks))])
    tree = stand.http.get(f"{talk.path}/tree").json()["turns"]
    rows = json.dumps([row["messages"] for row in stand.rows(session_id=talk.id)])
    return [(turn["turn"], turn["parent"], turn["branch"], turn["cause"]) for turn in tree], rows.replace(
        json.dumps(first)[1:-1], "first"
    )


@pytest.mark.parametrize("protocol", WIRES)
def test_long_requests_make_the_tree_of_short_ones(sglang: SimulatorProcess, tmp_path: Path, protocol: str) -> None:
    with serving(tmp_path, sglang.base_url) as stand:
        for seed in range(3):
            short, long = (play(stand, protocol, seed, first) for first in ("lorem", LONG))
            assert len({parent for _, parent, *_ in short[0]}) > 5
            assert long == short, seed
            for first in ("lorem", LONG):
                assert play(stand, protocol, seed, first, respells=True)[0] == short[0], seed
