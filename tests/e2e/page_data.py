"""Sessions such as a rollout leaves them: for tests of the page and for its pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
from integration.stand import WEATHER, Stand, Talk, until, user

SCORED: dict[str, Sequence[float]] = {
    "gsm8k/train-04127": (0.0, 1.0, 1.0, 0.25, 0.5, 1.0, 0.75, 0.0),
    "swe/django-11099": (0.0, 0.0, 0.0, 0.0),
    "aime/2025-I-13": (0.1, 0.9, 0.4, 0.35),
}
"""The rewards of each group's sessions; the second group's are all equal."""

MISSING = (1, 3)
"""Attempts of the third group that nobody made."""

CHECKPOINT = "step-40"
"""It was made before the last sessions began."""

ADAPTER = "code-lora"
AT_ONCE = {"latency_s": 0}
TASKS = (
    "How many apples are left if 23 of 60 were sold in the morning and half of the rest later?",
    "The test suite fails in one place. Find out why and propose a patch.",
    "Find all integers n for which n^2 + 19 n + 130 is a square.",
)


@dataclass
class Filled:
    """What is in the store: ids by what is special about them."""

    groups: dict[str, list[str]] = field(default_factory=dict)
    rolled_back: str = ""
    tree: str = ""
    refused: str = ""
    erased: str = ""
    idle: str = ""
    held: str = ""
    in_turn: list[str] = field(default_factory=list)
    waiting: list[HTTPConnection] = field(default_factory=list)

    def close(self) -> None:
        """Give up on the turns that wait."""
        for connection in self.waiting:
            connection.close()


def filled(stand: Stand) -> Filled:
    """Fill the stand's store through its own routes.

    Some turns stay open: at the engine, which is told to take its time, and at an adapter's gate.
    """
    found = Filled()
    for task, (group, rewards) in zip(TASKS, SCORED.items(), strict=True):
        found.groups[group] = [_scored(stand, group, task, at, reward) for at, reward in enumerate(rewards)]
    found.rolled_back = _rolled_back(stand)
    found.tree = _tree(stand)
    found.refused = _refused(stand)
    assert stand.http.post("/checkpoints", json={"name": CHECKPOINT}).status_code == 200
    found.idle = _idle(stand)
    found.erased = stand.talk(session_id="withdrawn-1").id
    assert stand.http.delete(f"/sessions/{found.erased}", params={"erase": True}).status_code == 204
    _waiting(stand, found)
    trained(stand.http, RUN, range(5, 10))
    return found


def _scored(stand: Stand, group: str, task: str, at: int, reward: float) -> str:
    attempt = at
    if group == "aime/2025-I-13":
        attempt = [n for n in range(9) if n not in MISSING][at]
    name = f"{group.split('/')[0]}-{attempt:02}"
    talk = stand.talk(session_id=name, group_id=group, attempt=attempt, metadata={"task": group, "harness": "demo"})
    talk.say(task, tools=[WEATHER], max_tokens=48)
    for _ in range(1 + at % 3):
        last = talk.messages[-1]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "sunny, 21 degrees"}
            for call in last.get("tool_calls") or []
        ]
        talk.add(*(results or [user("Are you sure?")]), tools=[WEATHER], max_tokens=48)
    body: dict[str, Any] = {"reward": reward}
    if at % 2:
        body["components"] = {"correct": reward, "length": -0.05}
    assert stand.http.put(f"{talk.path}/reward", json=body).status_code == 200
    assert stand.http.delete(talk.path).status_code == 204
    return talk.id


def _rolled_back(stand: Stand) -> str:
    """The client took its last turn back once."""
    talk = stand.talk(session_id="terminal-bench-7", group_id="terminal-bench/chess", attempt=0)
    talk.say("Write a chess engine.", max_tokens=32)
    history = list(talk.messages)
    talk.say("Now test it.", max_tokens=32)
    talk.messages = history
    talk.say("First, list the files.", max_tokens=32)
    return talk.id


def _tree(stand: Stand) -> str:
    """A plan that was tried twice, and a summary of it."""
    talk = stand.talk(session_id="deep-research-5", group_id="research/reefs", attempt=0, history="tree")
    talk.say("Which reefs recovered, and why?", max_tokens=32)
    history = list(talk.messages)
    for text in ("Search the surveys.", "Search the surveys.", "Ask the archive."):
        talk.messages = list(history)
        talk.say(text, max_tokens=32)
    talk.messages = [user("Summary so far:"), talk.messages[-1]]
    talk.say("Write the report.", max_tokens=32)
    return talk.id


def _refused(stand: Stand) -> str:
    """The engine failed a turn, and its reply to another was no good."""
    talk = stand.talk(session_id="flaky-engine-3", group_id="terminal-bench/chess", attempt=1)
    talk.say("Begin.", max_tokens=24)
    for fault in ("status_500", "nan_logprob"):
        stand.sim.post("/sim/faults", json={"fault": fault})
        assert talk.chat([*talk.messages, user("Go on.")]).status_code >= 500
    return talk.id


def _idle(stand: Stand) -> str:
    talk = stand.talk(session_id="notebook-12", group_id="dabench/plots", attempt=0)
    talk.say("Plot the sales by month.", max_tokens=24)
    return talk.id


def _waiting(stand: Stand, found: Filled) -> None:
    """Turns that do not end by themselves; nobody waits for their replies."""
    held = stand.talk(session_id="lora-coder-1", group_id="lora/refactor", attempt=0, adapter=ADAPTER)
    held.say("Rename the class.", max_tokens=24)
    assert stand.http.post(f"/adapters/{ADAPTER}/pause", json={"lease_s": 3600}).status_code == 200
    found.waiting.append(_asked(stand, held, [*held.messages, user("And its tests.")]))
    found.held = held.id
    stand.sim.post("/sim/latency", json={"latency_s": 3600})
    for number in range(3):
        talk = stand.talk(session_id=f"swe-long-{number}", group_id="swe/astropy-6938", attempt=number)
        found.waiting.append(_asked(stand, talk, [user("Read the whole repository.")]))
        stand.until_generating(talk)
        found.in_turn.append(talk.id)
    stand.sim.post("/sim/latency", json={"latency_s": 0})
    until(lambda: stand.get("/ui/api/overview")["sessions"]["paused"] == 1)


def _asked(stand: Stand, talk: Talk, messages: Sequence[dict[str, Any]]) -> HTTPConnection:
    """A turn's request without its reply; closing the connection is giving up."""
    connection = HTTPConnection(urlsplit(stand.server.base_url).netloc)
    body = json.dumps({"model": "simulator", "messages": list(messages)})
    connection.request("POST", talk.chat_path, body, {"content-type": "application/json"})
    return connection


SIDE_BY_SIDE = "retail/order-17"


def rollouts(stand: Stand, group: str = SIDE_BY_SIDE, count: int = 6) -> list[str]:
    """A group whose rollouts call a tool, begin alike and then differ; one has branches, one a refused reply."""
    return [_rollout(stand, group, number) for number in range(count)]


def _rollout(stand: Stand, group: str, number: int) -> str:
    name = f"{group.split('/')[0]}-{number:02}"
    tree = {"history": "tree"} if number == 3 else {}
    talk = stand.talk(session_id=name, group_id=group, attempt=number, metadata={"task": group}, **tree)
    talk.say(
        "A customer wants to return order 17. What do you do?",
        tools=[WEATHER],
        sim={**AT_ONCE, "text": "I will look it up."},
    )
    calls = [{"name": "get_weather", "arguments": {"city": "Bonn"}}]  # alike but for their ids, which are random
    called = talk.add(user("Yes."), tools=[WEATHER], sim={**AT_ONCE, "calls": calls})
    calls = called.json()["choices"][0]["message"].get("tool_calls") or []
    status = "delivered" if number % 2 else "in transit"
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f'{{"status": "{status}"}}'} for call in calls]
    talk.add(
        *(results or [user("Go on.")]), tools=[WEATHER], sim={**AT_ONCE, "tool_calls": False, "completion_tokens": 30}
    )
    if number == 4:
        assert (
            talk.chat([*talk.messages, user("Are you sure?")], sim={**AT_ONCE, "fault": "not_json"}).status_code >= 500
        )
    history = list(talk.messages)
    for step in range(number):
        talk.say(
            f"The customer asks again, for the {step + 1}. time.", sim={**AT_ONCE, "completion_tokens": 20 + 15 * step}
        )
    if number == 3:
        talk.messages = history
        talk.say("Another agent looks into it.", sim={**AT_ONCE, "completion_tokens": 24})
    reward = (number * 3 % 5) / 4
    body = {"reward": reward, "components": {"resolved": round(reward + 0.1, 3), "length": -0.1}}
    assert stand.http.put(f"{talk.path}/reward", json=body).status_code == 200
    return talk.id


RUN, FLAT, STUCK = "maze-8b", "maze/flat", "maze/stuck"


def trained(http: httpx.Client, run: str, versions: range, *, slope: float = 0.06) -> None:
    """A run: at each weight version a group of four attempts, whose rewards grow. In one group they are equal, one
    attempt fails, some turns fail, and one group waits for attempts that do not come."""
    for step, version in enumerate(versions):
        group = FLAT if step == 2 else f"maze/{version}"
        for attempt in range(4):
            lag, fails = attempt % 3 if step > 1 else 0, attempt == 3 and step % 3 == 1
            path = _begun(http, run, group, attempt, version, lag=lag, fails=fails)
            if (version, attempt) == (versions[-2], 3):
                failed = {"failed": {"kind": "sandbox", "message": "no disk"}}
                assert http.post(f"{path}/close", json=failed).status_code == 204
                continue
            reward = round(0.2 + slope * step + (0.0 if group == FLAT else 0.1 * attempt - 0.15), 3)
            assert http.put(f"{path}/reward", json={"reward": reward}).status_code == 200
            assert http.delete(path).status_code == 204
    _begun(http, run, STUCK, 0, versions[-1])


def _begun(
    http: httpx.Client, run: str, group: str, attempt: int, version: int, *, lag: int = 0, fails: bool = False
) -> str:
    """A session that waits for its reward, whose first turn is older by `lag` versions. Returns its path."""
    body = {"run": run, "group_id": group, "attempt": attempt, "group_size": 4, "metadata": {"task": group}}
    path = f"/sessions/{http.post('/sessions', json=body).raise_for_status().json()['session_id']}"
    messages: list[Any] = []
    for at, text in enumerate(("Find the way out of the maze.", "Go on.")):
        sim = {**AT_ONCE, "weight_versions": [str(version - lag if at == 0 else version)], "completion_tokens": 24}
        messages.append(user(text))
        asked = {"model": "simulator", "messages": messages, "sim": sim}
        reply = http.post(f"{path}/v1/chat/completions", json=asked).raise_for_status()
        messages.append(reply.json()["choices"][0]["message"])
    if fails:
        asked = {"model": "simulator", "messages": [*messages, user("And?")], "sim": {**AT_ONCE, "fault": "status_500"}}
        assert http.post(f"{path}/v1/chat/completions", json=asked).status_code >= 500
    return path
