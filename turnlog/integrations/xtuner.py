"""xtuner's agent loop (v1) on Turnlog: a sample is a rollout, and each of its rows a `RolloutState`."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any, Literal

import numpy as np
import ray
from xtuner.v1.data_proto.rl_data import RolloutState, Status
from xtuner.v1.rl.agent_loop import AgentLoop, AgentLoopConfig

from turnlog import AsyncTurnlog, name_of, rollout
from turnlog.rollouts import PATIENCE_S, life


class TurnlogAgentLoopConfig(AgentLoopConfig):  # type: ignore[misc]  # xtuner has no types
    """`agent_loop_config=TurnlogAgentLoopConfig(hf_checkpoint=…, sample_params=…, agent="my.agent:run")`.

    agent, command, failed, retry_failed, timeout_s: as `turnlog.rollout` takes them. run: the training run; by default
        `TURNLOG_RUN`. url: Turnlog's address; by default `TURNLOG_URL`. mode: "eval" for the evaluation's loop. task:
        another for each of several tasks, whose groups xtuner numbers alike; it does not tell the loop `task_name`.
    """

    agent: str | None = None
    command: str | list[str] | None = None
    mode: Literal["train", "eval"] = "train"
    task: str = "task"
    failed: Literal["keep", "drop"] = "drop"
    retry_failed: int = 0
    timeout_s: float | None = None
    run: str | None = None
    url: str | None = None
    enable_batch_judge: Literal[False] = False

    def build_local(self, rollout_controller: Any, judger: Any = None, logger: Any = None) -> TurnlogAgentLoop:
        return TurnlogAgentLoop(self, rollout_controller, judger, logger)


class TurnlogAgentLoop(AgentLoop):  # type: ignore[misc]  # xtuner has no types
    """As xtuner's own loops of agents, it leaves samples that failed out of a group. The group fails if one alone is
    left, whose advantage would be no number: GRPO divides by the deviation of a group's rewards."""

    def __init__(self, config: TurnlogAgentLoopConfig, rollout_controller: Any, judger: Any, logger: Any) -> None:
        super().__init__(rollout_controller, config.sample_params, config.hf_checkpoint, judger, logger)
        self._config = config

    async def generate_group(self, rollout_state: list[RolloutState], **kwargs: Any) -> list[RolloutState]:
        """The states of all rollouts, those of one together."""
        asked = {one.rollout_id: one for one in rollout_state}  # A group that comes again has a state for each row.
        for rollout_id in {one.rollout_id for one in rollout_state if one.status in (Status.ABORTED, Status.EXPIRED)}:
            fields = asked[rollout_id].extra_fields
            fields["turnlog_again"] = fields.get("turnlog_again", 0) + 1
        samples = await asyncio.gather(*map(self.generate_sample, asked.values()))
        states = [state for sample in samples for state in sample]
        left = [state for state in states if state.status != Status.FAILED]
        if len({state.rollout_id for state in left}) >= min(2, len(asked)):
            return left
        for state in left:
            state.status, state.error_msg = Status.FAILED, "the others of its group failed"
        return states

    async def generate_sample(self, rollout_state: RolloutState, **kwargs: Any) -> list[RolloutState]:
        """A state for each row, as of xtuner's loop for sandboxes. They share a `rollout_id`, by which the trainer
        counts their reward once. Raises TurnlogError."""
        config, state = self._config, rollout_state
        step, is_evaluation = state.extra_fields.get("producer_future_step"), config.mode == "eval"
        # xtuner numbers the groups of a task over the whole training, also after it was resumed.
        phase = (config.mode, step) if is_evaluation else (config.mode,)
        of = name_of(json.dumps(state.message, sort_keys=True))
        group = name_of(*life(config.run), config.task, *phase, state.group_id, of)
        again = uuid.uuid4().hex if is_evaluation else state.extra_fields.get("turnlog_again", 0)
        sampling = self.sample_params.model_dump()
        async with AsyncTurnlog(config.url, retry_for_s=PATIENCE_S) as turnlog:
            rows, outcome = await rollout(
                config.agent,
                state.message,
                name=name_of(group, state.rollout_id, again),
                shape="xtuner",
                command=config.command,
                sampling={**sampling, "stop": sampling["stops"], "tools": state.tools},
                metadata={**state.extra_fields, "data_source": state.data_source, "reward_model": state.reward_model},
                step=step,
                group_id=group,
                attempt=state.rollout_id,
                evaluation=is_evaluation,
                timeout_s=config.timeout_s,
                failed=config.failed,
                retry_failed=config.retry_failed,
                export={"replay": not is_evaluation},
                turnlog=turnlog,
                run=config.run,
            )
        if outcome.failed is not None:
            state.error_msg = f"{outcome.failed['kind']}: {outcome.failed.get('message')}"
        states = [
            state.model_copy(update={**row, "extra_fields": {**state.extra_fields, "turnlog": row["extra_fields"]}})
            for row in rows
        ] or [state]
        if rows and outcome.reward is None and outcome.failed is None and self.judger is not None:
            judged = await self.run_judger(states[-1])
            for one in states:
                one.reward = judged.reward
        for one in states:
            one.status = Status.COMPLETED if rows and one.reward is not None else Status.FAILED
            if outcome.status == "aborted":
                one.status = Status.ABORTED
            if rows and one.routed_experts is not None:
                one.routed_experts = ray.put(np.asarray(one.routed_experts))
        if is_evaluation:
            [*_, last] = states
            last.status, last.reward, last.response = (
                Status.COMPLETED,
                last.reward or {"score": 0.0},
                last.response or "",
            )
            return [last]
        return states
