"""xtuner's agent loop (v1) on Turnlog: a sample is a rollout, and each of its rows a `RolloutState`."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import ray
from xtuner.v1.data_proto.rl_data import RolloutState, Status
from xtuner.v1.rl.agent_loop import AgentLoop, AgentLoopConfig

from turnlog import AsyncTurnlog, name_of, rollout

FINISH = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "error", "empty": "error"}


class TurnlogAgentLoopConfig(AgentLoopConfig):  # type: ignore[misc]  # xtuner has no types
    """`agent_loop_config=TurnlogAgentLoopConfig(hf_checkpoint=…, sample_params=…, agent="my.agent:run")`.

    agent, command, failed, retry_failed, timeout_s: as `turnlog.rollout` takes them. run: the training run; by default
        `TURNLOG_RUN`. url: Turnlog's address; by default `TURNLOG_URL`. mode: "eval" for the evaluation's loop.
    """

    agent: str | None = None
    command: str | list[str] | None = None
    mode: Literal["train", "eval"] = "train"
    failed: Literal["keep", "drop"] = "drop"
    retry_failed: int = 0
    timeout_s: float | None = None
    run: str | None = None
    url: str | None = None
    enable_batch_judge: Literal[False] = False

    def build_local(self, rollout_controller: Any, judger: Any = None, logger: Any = None) -> TurnlogAgentLoop:
        return TurnlogAgentLoop(self, rollout_controller, judger, logger)


class TurnlogAgentLoop(AgentLoop):  # type: ignore[misc]  # xtuner has no types
    """As xtuner's own loops for agents, it leaves samples that failed out of a group, unless all did."""

    def __init__(self, config: TurnlogAgentLoopConfig, rollout_controller: Any, judger: Any, logger: Any) -> None:
        super().__init__(rollout_controller, config.sample_params, config.hf_checkpoint, judger, logger)
        self._config = config

    async def generate_group(self, rollout_state: list[RolloutState], **kwargs: Any) -> list[RolloutState]:
        """The states of all rollouts, those of one together."""
        again = {one.rollout_id for one in rollout_state if one.status in (Status.ABORTED, Status.EXPIRED)}
        asked = {one.rollout_id: one for one in rollout_state}  # One that comes again has a state for each row.
        for rollout_id in again:
            fields = asked[rollout_id].extra_fields
            fields["turnlog_again"] = fields.get("turnlog_again", 0) + 1
        samples = await asyncio.gather(*(self.generate_sample(one) for one in asked.values()))
        states = [state for sample in samples for state in sample]
        return [state for state in states if state.status != Status.FAILED] or states

    async def generate_sample(self, rollout_state: RolloutState, **kwargs: Any) -> list[RolloutState]:
        """A state for each row, as xtuner's loop for sandboxes has it: its trainer counts the reward of those with one
        `rollout_id` once. Raises TurnlogError."""
        config, state = self._config, rollout_state
        step = state.extra_fields.get("producer_future_step")
        # Of training, xtuner numbers groups over the whole run, also after it was resumed; of tasks each by itself.
        phase = (config.mode, step) if config.mode == "eval" else (config.mode,)
        group = name_of(*phase, state.group_id, name_of(json.dumps(state.message, sort_keys=True)))
        sampling = self.sample_params.model_dump()
        async with AsyncTurnlog(config.url) as turnlog:
            rows, outcome = await rollout(
                config.agent,
                state.message,
                name=name_of(group, state.rollout_id, state.extra_fields.get("turnlog_again", 0)),
                command=config.command,
                sampling={**sampling, "stop": sampling["stops"], "tools": state.tools},
                metadata={**state.extra_fields, "data_source": state.data_source, "reward_model": state.reward_model},
                step=step,
                group_id=group,
                attempt=state.rollout_id,
                evaluation=config.mode == "eval",
                timeout_s=config.timeout_s,
                failed=config.failed,
                retry_failed=config.retry_failed,
                export={"replay": config.mode == "train"},
                turnlog=turnlog,
                run=config.run,
            )
        state.finish_reason = FINISH[outcome.status]
        state.extra_fields["turnlog_session"] = outcome.session_id
        state.response = _text(rows[-1]["messages"]) if rows else ""
        state.reward = None if outcome.reward is None else {"score": outcome.reward}
        if outcome.failed is not None:
            state.error_msg = f"{outcome.failed['kind']}: {outcome.failed.get('message')}"
        if state.reward is None and rows and outcome.failed is None and self.judger is not None:
            state = await self.run_judger(state)
        if config.mode == "eval":
            state.status, state.reward = Status.COMPLETED, state.reward or {"score": 0.0}
            return [state]
        if outcome.status == "aborted":
            state.status = Status.ABORTED
        elif not rows or state.reward is None:
            state.status = Status.FAILED
        else:
            state.status = Status.COMPLETED
            return [state.model_copy(update=_sequence(row)) for row in rows]
        return [state]


def _sequence(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as the fields of a state that its trainer takes as they are: not shifted, T entries each."""
    tokens, mask = row["tokens"], row["loss_mask"]
    in_loss = [place for place, one in enumerate(mask) if one]
    versions = [] if row["weight_version_names"] else [row["weight_versions"][place] for place in in_loss]
    found: dict[str, Any] = {
        "input_ids": tokens,
        "labels": [token if one else -100 for token, one in zip(tokens, mask, strict=True)],
        "logprobs": row["logprobs"],
        "response_ids": [tokens[place] for place in in_loss],
        "response_model_steps": versions,  # Where it is empty, xtuner fills in its own step.
        "response": _text(row["messages"]),
        "routed_experts": None,
    }
    if row.get("routed_experts"):
        ids = np.frombuffer(base64.b64decode(row["routed_experts"]), row["dtype"]).reshape(row["shape"])
        found["routed_experts"] = ray.put(ids)
    return found


def _text(messages: list[dict[str, Any]]) -> str:
    content = messages[-1].get("content") if messages else None
    return content if isinstance(content, str) else json.dumps(content or "")
