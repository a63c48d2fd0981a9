"""tinker-cookbook: rollouts on engines of one's own, by agents or by the cookbook's own environments.

`rl.train.Config(rollout_error_tolerance=TurnlogRollouts("my.agent:run"), …)`, whose data set gives `TurnlogGroup`s.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tinker import ModelInput
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import AllTrajectoriesFailedError
from tinker_cookbook.rl.rollout_strategy import RolloutResult, RolloutStrategy
from tinker_cookbook.rl.rollouts import do_single_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RolloutError, StopReason, Trajectory, Transition

from turnlog.client._async.client import AsyncTurnlog
from turnlog.client._async.transport import AsyncTransport
from turnlog.rollouts import PATIENCE_S, Agent, Rollout, rollout


class TurnlogTokenCompleter(TokenCompleter):  # type: ignore[misc]
    """Completes ids in the session of this address, for `do_single_rollout` and what else wants a TokenCompleter."""

    def __init__(
        self, url: str, token: str | None = None, *, max_tokens: int, temperature: float = 1.0, **sampling: Any
    ) -> None:
        self.max_tokens = max_tokens
        self.temperature = temperature
        self._sampling = sampling
        self._transport = AsyncTransport(url, token, PATIENCE_S, PATIENCE_S)

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def __call__(
        self, model_input: ModelInput, stop: Sequence[str] | Sequence[int], *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """Raises TurnlogError, RuntimeError for a generation that was aborted, ValueError for a prompt with images."""
        limit = self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens)
        sampling = {**self._sampling, "temperature": self.temperature, "max_new_tokens": limit}
        if stop:
            sampling["stop_token_ids" if isinstance(stop[0], int) else "stop"] = list(stop)
        asked = {"input_ids": model_input.to_ints(), "sampling_params": sampling, "return_logprob": True}
        reply = await self._transport.read("POST", "/generate", body=asked, key=uuid.uuid4().hex, slow=True)
        said = reply["meta_info"]
        reason = said["finish_reason"]["type"]
        if reason == "abort":
            raise RuntimeError("the engine aborted the generation")
        return TokensWithLogprobs(
            tokens=reply["output_ids"],
            maybe_logprobs=[logprob for logprob, *_ in said["output_token_logprobs"]],
            stop_reason="length" if reason == "length" else "stop",
            prompt_cache_hit_tokens=said.get("cached_tokens") or 0,
        )


@dataclass(frozen=True)
class TurnlogGroup(EnvGroupBuilder):  # type: ignore[misc]
    """A prompt for `group_size` rollouts of an agent. `name`: of the batch and the place in it, so that a trainer that
    was killed plays nothing again; without it the group is played each time."""

    prompt: Any
    group_size: int
    name: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()

    async def make_envs(self) -> Sequence[Env]:
        return []

    def logging_tags(self) -> list[str]:
        return list(self.tags)


@dataclass(frozen=True)
class TurnlogRollouts(RolloutStrategy):  # type: ignore[misc]
    """How a group's trajectories are made: by an agent, by a command, or without either by the group's environments.

    failed: the rows of a rollout that failed: keep, or drop. Dropped ones are among the group's errors.
    sampling: more than `max_tokens` and `temperature`, which are the trainer's.
    """

    agent: Agent | str | None = None
    command: str | Sequence[str] | None = None
    failed: Literal["keep", "drop"] = "drop"
    retry_failed: int = 0
    timeout_s: float | None = None
    run: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def catches_group_errors(self) -> bool:
        return True

    async def execute(self, env_group_builder: EnvGroupBuilder, policy: TokenCompleter) -> RolloutResult:
        """Raises AllTrajectoriesFailedError and TurnlogError: the trainer skips the group."""
        group = getattr(env_group_builder, "name", None) or uuid.uuid4().hex
        envs = list(await env_group_builder.make_envs())
        size = len(envs) or env_group_builder.group_size
        lived: dict[int, Trajectory] = {}

        async def of_env(base_url: str, metadata: Mapping[str, Any], request_kwargs: dict[str, Any], **_: Any) -> float:
            attempt = metadata["attempt"]
            if attempt in lived:  # An environment is for one use.
                envs[attempt] = (await env_group_builder.make_envs())[attempt]
            completer = TurnlogTokenCompleter(base_url, metadata["api_key"], **request_kwargs)
            try:
                lived[attempt] = Trajectory([], ModelInput.empty())
                lived[attempt] = await do_single_rollout(completer, envs[attempt])
            finally:
                await completer.aclose()
            return float(sum(transition.reward for transition in lived[attempt].transitions))

        async with AsyncTurnlog(retry_for_s=PATIENCE_S) as turnlog:
            played = await asyncio.gather(
                *[
                    rollout(
                        of_env if envs else self.agent,
                        getattr(env_group_builder, "prompt", None),
                        name=f"{group}.{attempt}",
                        command=None if envs else self.command,
                        sampling={**self.sampling, "max_tokens": policy.max_tokens, "temperature": policy.temperature},
                        metadata=getattr(env_group_builder, "metadata", None),
                        group_id=group,
                        attempt=attempt,
                        timeout_s=self.timeout_s,
                        failed=self.failed,
                        retry_failed=self.retry_failed,
                        turnlog=turnlog,
                        run=self.run,
                    )
                    for attempt in range(size)
                ]
            )
        made = [
            lived[attempt] if one.outcome.played and one.outcome.error is None and attempt in lived else trajectory(one)
            for attempt, one in enumerate(played)
        ]
        errors = []
        for one, lives in zip(played, made, strict=True):
            if (failure := one.outcome.failed) is not None:
                errors.append(RolloutError(failure["kind"], failure.get("message", "")))
            elif not lives.transitions:
                errors.append(RolloutError("empty", f"session {one.outcome.session_id} has no turn to train on"))
        kept = [attempt for attempt, one in enumerate(made) if one.transitions]
        if not kept:
            raise AllTrajectoriesFailedError(f"no rollout of group {group} has a turn to train on: {errors[:1]}")
        return RolloutResult([made[one] for one in kept], [envs[one] for one in kept] if envs else [], errors)


def trajectory(played: Rollout) -> Trajectory:
    """The turns of the rows of `shape="turnlog"`, each where it is in the loss. The reward is the last one's; without
    one it is 0.0, for `compute_group_rewards` to add to. No transitions: nothing to train on."""
    transitions = []
    for row in played.rows:
        for turn in row["turns"]:
            start, end = turn["output_start"], turn["end"]
            if any(row["loss_mask"][start:end]):
                said = TokensWithLogprobs(
                    tokens=row["tokens"][start:end],
                    maybe_logprobs=row["logprobs"][start:end],
                    stop_reason="length" if turn["finish_reason"] == "length" else "stop",
                    prompt_cache_hit_tokens=turn["cached_tokens"] or 0,
                )
                observed = ModelInput.from_ints(row["tokens"][:start])
                transitions.append(Transition(observed, said, reward=0.0, episode_done=False))
    if transitions:
        transitions[-1].reward = played.outcome.reward or 0.0
        transitions[-1].episode_done = True
    reason = StopReason.MAX_TOKENS if played.outcome.status == "truncated" else StopReason.COMPLETED
    return Trajectory(transitions, ModelInput.empty(), stop_reason=reason)
