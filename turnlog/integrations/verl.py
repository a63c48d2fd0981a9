"""verl's agent loop (0.9) on Turnlog: `run` plays a rollout and returns its rows as `AgentLoopOutput`s."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from turnlog import AsyncSession, AsyncTurnlog
from turnlog.integrations.rollouts import name_of, played


class _Output(AgentLoopOutput):  # type: ignore[misc]  # verl has no types
    """verl makes `rm_scores` of `reward_score`, at the last token; here they stand where turns earned them."""

    rm_scores: list[float] | None = None

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = super().as_dict()
        if self.rm_scores is not None:
            found["rm_scores"] = torch.tensor(self.rm_scores)
        return found


class TurnlogAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl has no types
    """Write `play`, and register the class under a name of your own.

    url: Turnlog's address; by default `TURNLOG_URL`. retry_failed: how often a rollout whose session was closed as
    failed is played again.
    A rollout is named by verl's `uid`, `session_id` and `global_steps`: asked for again, it is not played again.
    """

    url: ClassVar[str | None] = None
    retry_failed: ClassVar[int] = 0

    @abstractmethod
    async def play(self, session: AsyncSession, sampling_params: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        """Run the agent at `session.base_url` and set the reward. `fields` are the data set's and verl's own."""

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> list[AgentLoopOutput]:
        """An output for each row of the rollout. Raises what `play` raises, and TurnlogError."""
        uid = str(fields["uid"])
        attempt = fields.get("session_id", 0)

        async def play(session: AsyncSession) -> None:
            await self.play(session, sampling_params, fields)

        async with AsyncTurnlog(self.url) as turnlog:
            rows = await played(
                turnlog,
                name_of(uid, attempt, fields.get("global_steps", 0)),
                play,
                shape="verl",
                rewards="turn",
                retry_failed=self.retry_failed,
                group_id=uid,
                attempt=attempt,
            )
        return [_Output(**row) for row in rows]
