"""`turnlog.rollout`: an agent is played once under a name, and what became of it stands in its session."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

import turnlog
from integration.stand import Stand
from turnlog import AsyncTurnlog, Rollout, errors, name_of
from turnlog.rollouts import load, request_kwargs, text_of

pytestmark = pytest.mark.anyio

PROMPT = [{"role": "user", "content": "Hello"}]

COMMAND = """
import json, os, sys, urllib.request
told = json.load(open(os.environ["TURNLOG_ROLLOUT"]))
body = {"model": "simulator", "messages": told["prompt"], **told["request_kwargs"]}
head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), head)
urllib.request.urlopen(asked).read()
print("thinking")
"""
"""A program that plays one turn; what follows is its end."""


class Agent:
    """Plays one turn, then returns or raises what it is given, each time the next."""

    def __init__(self, *ends: Any) -> None:
        self.calls: list[dict[str, Any]] = []
        self._ends = ends or (1.0,)

    async def __call__(self, **asked: Any) -> Any:
        self.calls.append(asked)
        end = self._ends[min(len(self.calls), len(self._ends)) - 1]
        body = {"model": "simulator", "messages": asked["prompt"], **asked["request_kwargs"]}
        head = {"authorization": f"Bearer {asked['metadata']['api_key']}"}
        async with httpx.AsyncClient(headers=head, timeout=60) as http:
            (await http.post(f"{asked['base_url']}/v1/chat/completions", json=body)).raise_for_status()
        if isinstance(end, BaseException):
            raise end
        return await end() if callable(end) else end


@pytest.fixture
async def server(stand: Stand) -> AsyncIterator[AsyncTurnlog]:
    async with AsyncTurnlog(stand.base_url) as made:
        yield made


@pytest.fixture
def play(server: AsyncTurnlog) -> Callable[..., Any]:
    """A rollout of a name of the test's own."""
    name = uuid.uuid4().hex

    async def played(agent: Any, **more: Any) -> Rollout:
        return await turnlog.rollout(agent, PROMPT, **{"name": name, "turnlog": server, **more})

    return played


@pytest.mark.parametrize(
    ("result", "reward", "failed"),
    [
        (2, 2.0, None),
        (None, None, None),
        ({"reward": 0.5, "reward_components": {"a": 0.5}, "steps": 3}, 0.5, None),
        ({"reward": None, "log": "x" * 9000}, None, None),
        ({"failed": {"kind": "sandbox", "message": "gone"}}, None, "sandbox"),
        (float("nan"), None, "agent"),
        (ValueError("no answer"), None, "agent"),
        ({"reward": 1.0, "failed": {"kind": "bored"}}, None, "agent"),
        ({("a", "b"): 1, "reward": 1.0}, 1.0, None),
        (TimeoutError(), None, "timeout"),
        (SystemExit(3), None, "agent"),
        (RuntimeError("\0"), None, "agent"),
    ],
    ids=repr,
)
async def test_what_an_agent_returns_stands_in_its_session_and_it_is_played_once(
    play: Callable[..., Any], server: AsyncTurnlog, result: Any, reward: float | None, failed: str | None
) -> None:
    agent = Agent(result)
    first, again = [await play(agent, group_id="g", attempt=3) for _ in range(2)]
    assert len(agent.calls) == 1
    assert [first.outcome.played, again.outcome.played] == [True, False]
    assert len(first.rows) == 1
    assert again.rows == first.rows
    [row] = first.rows
    assert (row["group_id"], row["attempt"], row["reward"]) == ("g", 3, reward)
    for outcome in (first.outcome, again.outcome):
        assert outcome.reward == reward
        assert (outcome.failed or {}).get("kind") == failed
        assert outcome.status == ("failed" if failed else "completed")
        is_kept = not isinstance(result, BaseException) and not (isinstance(result, dict) and ("a", "b") in result)
        assert outcome.result == (None if not is_kept else "NaN" if result != result else result)
    state = await server.attach(first.outcome.session_id).state()
    assert (state["status"], (state["failed"] or {}).get("kind")) == ("closed", failed)
    if isinstance(result, dict) and "reward_components" in result:
        assert row["reward_components"] == {"a": 0.5}


async def test_one_whose_player_died_is_left_as_failed_and_another_is_played(
    play: Callable[..., Any], server: AsyncTurnlog
) -> None:
    async def dies() -> None:
        await asyncio.Event().wait()

    agent = Agent(dies, dies, 1.0)
    for _ in range(2):
        task = asyncio.create_task(play(agent))
        count = len(agent.calls)
        while len(agent.calls) == count:
            await asyncio.sleep(0)
        session_id = agent.calls[-1]["metadata"]["session_id"]
        while not (await server.attach(session_id).state())["turns"]:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    found = await play(agent)
    assert (found.outcome.session_id, found.outcome.reward) == (session_id[:-1] + "2", 1.0)
    left = server.attach(session_id)
    assert ((await left.state())["failed"] or {})["kind"] == "other"
    assert await play(agent) == found._replace(outcome=found.outcome._replace(played=False))
    assert len(agent.calls) == 3


async def test_one_that_was_begun_is_never_begun_again(play: Callable[..., Any], server: AsyncTurnlog) -> None:
    """Its agent may still be there, and its first turn on its way."""
    agent, name = Agent(), uuid.uuid4().hex
    begun = await server.create_session(session_id=f"{name}.0", history="tree")
    await begun.annotate("rollout", {"ended": False})
    assert (await play(agent, name=name)).outcome.session_id == f"{name}.1"


@pytest.mark.parametrize("what", ["exits", "closes"])
async def test_a_function_in_a_thread_may_do_anything(play: Callable[..., Any], what: str) -> None:
    def run(base_url: str, prompt: Any, **more: Any) -> None:
        reply = httpx.post(
            f"{base_url}/v1/chat/completions", json={"model": "simulator", "messages": prompt}, timeout=60
        )
        reply.raise_for_status()
        if what == "exits":
            sys.exit(1)
        httpx.delete(base_url).raise_for_status()
        raise ValueError("after the close")

    for _ in range(2):
        outcome = (await play(run)).outcome
        assert (outcome.status, (outcome.failed or {}).get("kind")) == ("failed", "agent")


async def test_one_that_failed_is_played_again_as_often_as_asked(play: Callable[..., Any]) -> None:
    agent = Agent(ValueError(), ValueError(), 1.0)
    assert (await play(agent, retry_failed=1, failed="drop")).rows == []
    found = await play(agent, retry_failed=2)
    assert (found.outcome.reward, len(agent.calls)) == (1.0, 3)


async def test_one_that_a_restored_checkpoint_has_undone_is_played_again(
    play: Callable[..., Any], server: AsyncTurnlog
) -> None:
    run, agent = uuid.uuid4().hex, Agent(1.0)
    await play(agent, run=run, name="before")
    await server.checkpoint("cut", run=run)
    await play(agent, run=run)
    await server.restore_checkpoint("cut", run=run)
    found = [await play(agent, run=run, name="before"), await play(agent, run=run), await play(agent, run=run)]
    assert [one.outcome.played for one in found] == [False, True, False]


async def test_an_agent_that_takes_too_long_is_ended(play: Callable[..., Any]) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    outcome = (await play(Agent(never), timeout_s=0.5)).outcome
    assert (outcome.status, (outcome.failed or {}).get("kind")) == ("failed", "timeout")
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    outcome = (await play(None, name=uuid.uuid4().hex, command=command, timeout_s=0.5)).outcome
    assert (outcome.status, (outcome.failed or {}).get("kind")) == ("failed", "timeout")


@pytest.mark.parametrize(
    ("end", "reward", "failed"),
    [
        ("print(0.25)", 0.25, None),
        ('print(json.dumps({"reward": 1, "reward_components": {"a": 1}}))', 1.0, None),
        ("print('done')", None, None),
        ("print(sys.stdin.read() == 'Hello' and 3)", 3.0, None),
        ("import subprocess; subprocess.Popen(['sleep', '600']); print(0.5)", 0.5, None),
        ("print(3.0 if 'TURNLOG_TOKEN' not in os.environ else 0)", 3.0, None),
        ("sys.exit('a traceback')", None, "agent"),
    ],
)
async def test_a_command_is_an_agent(
    play: Callable[..., Any], end: str, reward: float | None, failed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNLOG_TOKEN", "of-the-trainer")
    outcome = (await play(None, command=(sys.executable, "-c", COMMAND + end), sampling={"max_new_tokens": 5})).outcome
    assert (outcome.reward, (outcome.failed or {}).get("kind")) == (reward, failed)
    if failed:
        assert outcome.failed is not None
        assert "exit code 1: a traceback" in outcome.failed["message"]


def sync_agent(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> float:
    body = {"model": "simulator", "messages": prompt, **request_kwargs}
    reply = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    return float(reply.json()["usage"]["completion_tokens"])


async def test_an_agent_is_found_by_its_import_path_and_its_sampling_is_pinned(
    play: Callable[..., Any], server: AsyncTurnlog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNLOG_AGENT", f"{__name__}:sync_agent")
    sampling = {"temperature": 0.7, "top_k": 0, "max_new_tokens": 7, "n": 1, "stop": []}
    found = await play(None, sampling=sampling)
    assert found.outcome.reward == 7.0
    assert found.rows[0]["pinned"]["params"] == {"temperature": 0.7, "top_k": -1}
    assert load(f"{__name__}.sync_agent") is sync_agent
    assert request_kwargs(sampling) == {"temperature": 0.7, "max_tokens": 7}
    monkeypatch.delenv("TURNLOG_AGENT")
    with pytest.raises(ValueError, match="TURNLOG_AGENT"):
        load(None)


async def test_another_session_of_that_name_is_not_touched(play: Callable[..., Any], server: AsyncTurnlog) -> None:
    await server.create_session(session_id="taken.0", group_id="others")
    with pytest.raises(errors.Conflict):
        await play(Agent(), name="taken", group_id="g")


async def test_runs_have_rollouts_of_one_name(play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(1.0)
    monkeypatch.setenv("TURNLOG_RUN", "one")
    found = [await play(agent), await play(agent, run="two")]
    assert [one.rows[0]["run"] for one in found] == ["one", "two"]
    assert len(agent.calls) == 2


def test_what_no_session_can_be_called_is_hashed() -> None:
    assert name_of("run", 3, "task_1") == "run:3:task_1"
    assert len(name_of("a task with spaces")) == 64 == len(name_of("x" * 101))


def test_the_text_of_a_prompt() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert [text_of("a"), text_of([{"role": "user", "content": parts}, {"role": "assistant"}])] == ["a", "a\nb"]
    assert json.loads(text_of({"task": 1})) == {"task": 1}
