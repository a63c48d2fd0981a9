"""SkyRL's generator (0.4) on Turnlog: trajectories of a batch are played side by side, each in a session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.generators.utils import get_rollout_metrics

from turnlog import AsyncSession, AsyncTurnlog
from turnlog.integrations.rollouts import name_of, played

Play = Callable[[AsyncSession, Any, Mapping[str, Any]], Awaitable[None]]
"""Runs the agent at `session.base_url` on a prompt, with the data set's extras, and sets the reward."""


class TurnlogGenerator(GeneratorInterface):  # type: ignore[misc]  # SkyRL has no types
    """For the synchronous and the fully asynchronous trainer, which has several `generate` calls under way at once.

    run: the training run of the sessions. A trajectory is named by it, the step and phase, and SkyRL's own id: asked
    for again, it is not played again. rewards: of `turn`, each token of a response has one. retry_failed: how often a
    trajectory whose session was closed as failed is played again. session_fields: more arguments of `create_session`.
    """

    def __init__(
        self,
        turnlog: AsyncTurnlog,
        play: Play,
        *,
        run: str,
        rewards: Literal["total", "turn"] = "total",
        retry_failed: int = 0,
        **session_fields: Any,
    ) -> None:
        self._turnlog = turnlog
        self._play = play
        self._run = run
        self._rewards = rewards
        self._retry_failed = retry_failed
        self._fields = session_fields

    async def generate(self, input_batch: GeneratorInput, **ignored: Any) -> GeneratorOutput:
        """The rows of all trajectories, those of one together. Raises what `play` raises, and TurnlogError."""
        ids = input_batch["trajectory_ids"]
        extras = input_batch["env_extras"] or [{}] * len(ids)
        metadata = input_batch["batch_metadata"]
        when = (metadata.training_phase, metadata.global_step) if metadata is not None else ()
        names = (name_of(*when, one.to_string()) for one in ids)
        timed = await asyncio.gather(*map(self._timed, names, input_batch["prompts"], extras, ids))
        rows = [row for trajectory, _ in timed for row in trajectory]
        responses, rewards = [row["response_ids"] for row in rows], [row["rewards"] for row in rows]
        return GeneratorOutput(
            prompt_token_ids=[row["prompt_token_ids"] for row in rows],
            response_ids=responses,
            rewards=rewards,
            loss_masks=[row["loss_masks"] for row in rows],
            stop_reasons=[row["stop_reasons"] for row in rows],
            rollout_metrics=get_rollout_metrics(responses, rewards),
            rollout_logprobs=[row["rollout_logprobs"] for row in rows],
            trajectory_ids=[TrajectoryID(**row["trajectory_ids"]) for row in rows],
            trajectory_generation_times=[seconds for _, seconds in timed],
            trajectory_time_splits=None,
            rollout_expert_indices=None,
            rollout_sample_support=None,
            is_last_step=[row["is_last_step"] for row in rows],
        )

    async def _timed(
        self, name: str, prompt: Any, extras: Mapping[str, Any], trajectory: TrajectoryID
    ) -> tuple[list[dict[str, Any]], float]:
        """The rows of a trajectory, and how many seconds they took."""
        begun = time.monotonic()

        async def play(session: AsyncSession) -> None:
            await self._play(session, prompt, extras)

        of_group = {"group_id": trajectory.instance_id, "attempt": trajectory.repetition_id}
        fields = {"run": self._run, **of_group, **self._fields}
        rows = await played(
            self._turnlog,
            name,
            play,
            shape="skyrl",
            rewards=self._rewards,
            retry_failed=self._retry_failed,
            **fields,
        )
        return rows, time.monotonic() - begun
