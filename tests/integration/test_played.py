"""Rollouts that a trainer asks for by name (`turnlog.integrations.rollouts`), without a trainer's package."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from integration.stand import Stand
from turnlog import AsyncSession, AsyncTurnlog, errors
from turnlog.integrations.rollouts import name_of, played

pytestmark = pytest.mark.anyio


class Agent:
    """Plays one turn; dies before its reward as often as ordered."""

    def __init__(self, deaths: int = 0) -> None:
        self.played = 0
        self._deaths = deaths

    async def __call__(self, session: AsyncSession) -> None:
        self.played += 1
        body = {"model": "simulator", "messages": [{"role": "user", "content": f"Turn of {session.id}"}]}
        async with httpx.AsyncClient() as http:
            (await http.post(f"{session.base_url}/chat/completions", json=body)).raise_for_status()
        if self.played <= self._deaths:
            raise TimeoutError
        await session.set_reward(1.0)


@pytest.mark.parametrize("deaths", [0, 2])
@pytest.mark.parametrize("shape", ["verl", "skyrl"])
async def test_a_rollout_is_played_until_it_is_rewarded(stand: Stand, shape: Any, deaths: int) -> None:
    agent, name = Agent(deaths), f"played:{shape}:{deaths}"
    async with AsyncTurnlog(stand.base_url) as turnlog:
        for _ in range(deaths):
            with pytest.raises(TimeoutError):
                await played(turnlog, name, agent, shape=shape, group_id="a")
        first, second = [await played(turnlog, name, agent, shape=shape, group_id="a") for _ in range(2)]
    assert agent.played == deaths + 1
    assert len(first) == 1
    assert first[0]["response_ids"] == second[0]["response_ids"]


async def test_a_session_left_open_is_closed_and_another_played(stand: Stand) -> None:
    async with AsyncTurnlog(stand.base_url) as turnlog:
        with pytest.raises(TimeoutError):
            await Agent(deaths=1)(await turnlog.create_session(session_id="left.0", history="tree"))
        agent = Agent()
        [row] = await played(turnlog, "left", agent, shape="verl")
        assert (agent.played, row["extra_fields"]["session_id"]) == (1, "left.1")
        with pytest.raises(errors.SessionClosed):
            await turnlog.attach("left.0").get()


async def test_another_session_of_that_name_is_not_touched(stand: Stand) -> None:
    async with AsyncTurnlog(stand.base_url) as turnlog:
        await turnlog.create_session(session_id="taken.0", group_id="others")
        with pytest.raises(errors.Conflict):
            await played(turnlog, "taken", Agent(), shape="verl")


def test_what_no_session_can_be_called_is_hashed() -> None:
    assert name_of("run", 3, "task_1") == "run:3:task_1"
    assert len(name_of("a task with spaces")) == 64 == len(name_of("x" * 101))
