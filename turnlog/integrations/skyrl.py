"""SkyRL's generator (0.4) on Turnlog, and its entry point: `trainer.override_entrypoint=turnlog.integrations.skyrl`."""

import asyncio
import contextlib
import logging
import math
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
import ray
from loguru import logger
from skyrl.backends.skyrl_train.utils.routed_experts import compact_routed_expert_indices
from skyrl.backends.skyrl_train.utils.sample_support import SAMPLE_SUPPORT_DTYPE, SAMPLE_SUPPORT_PADDING
from skyrl.train.config import GeneratorConfig, SkyRLTrainConfig
from skyrl.train.config.config import BaseConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput, TrajectoryID
from skyrl.train.generators.utils import apply_overlong_filtering, get_rollout_metrics
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from turnlog import AsyncTurnlog, name_of, rollout
from turnlog.client.address import default_run
from turnlog.errors import NotFound, TurnlogError
from turnlog.integrations.engines import take_engine
from turnlog.rollouts import PATIENCE_S

Row = dict[str, Any]

ERROR = "error"
MASKED: Row = {
    "prompt_token_ids": [0],
    "response_ids": [0],
    "loss_masks": [0],
    "rollout_logprobs": [0.0],
    "stop_reasons": ERROR,
}
"""What SkyRL's own generators give for a trajectory that failed: a batch that lacks one fails."""

EXPERTS, SUPPORT = "rollout_expert_indices", "rollout_sample_support"

KEPT_STEPS = 64
"""SkyRL's fully asynchronous trainer asks for rollouts of several steps at a time, of fewer than this."""


@dataclass
class TurnlogConfig(BaseConfig):  # type: ignore[misc]  # SkyRL has no types
    """`turnlog.…` in SkyRL's configuration; what is not explained is that of `turnlog.rollout`."""

    agent: str | None = None
    command: str | None = None
    run: str | None = None
    """By default `TURNLOG_RUN`. A trainer that is started again under it is given what was played."""
    url: str | None = None
    failed: str = "keep"
    retry_failed: int = 0
    timeout_s: float | None = None
    max_agents: int = 512
    """At a time."""
    rewards: str = "total"
    """`turn`: each token of a response has one."""
    session: dict[str, Any] = field(default_factory=dict)
    """More fields of `create_session`."""
    add_engines: bool = True
    """Make SkyRL's engines this run's in Turnlog, and tell it the version after each update of their weights."""


@dataclass
class TurnlogTrainConfig(SkyRLTrainConfig):  # type: ignore[misc]
    turnlog: TurnlogConfig = field(default_factory=TurnlogConfig)


class TurnlogGenerator(GeneratorInterface):  # type: ignore[misc]
    """A trajectory is a rollout named by phase, step and SkyRL's own id; one sampled again in a step is another."""

    def __init__(self, config: TurnlogConfig, generator: GeneratorConfig) -> None:
        if not (config.run or default_run()):
            raise ValueError("the rollouts have no run: set turnlog.run, or TURNLOG_RUN, to a name of this training")
        self._config, self._generator = config, generator
        self._places = asyncio.Semaphore(config.max_agents)
        self._asked: dict[tuple[str, int | None], Counter[str]] = {}
        self._layers: tuple[int, ...] | None = None

    async def generate(self, input_batch: GeneratorInput, **ignored: Any) -> GeneratorOutput:
        """The rows of a trajectory stand together. One without rows is masked, with its group's mean as its reward,
        which moves no baseline; in an evaluation 0.

        Raises TurnlogError, and ValueError for several rows of a trajectory without step-wise training, and for a batch
        without the payloads that SkyRL is to replay.
        """
        config, prompts, metadata = self._generator, input_batch["prompts"], input_batch["batch_metadata"]
        ids = input_batch["trajectory_ids"] or [TrajectoryID(uuid4().hex, 0) for _ in prompts]
        extras = input_batch["env_extras"] or [{}] * len(ids)
        sampling = input_batch["sampling_params"] or {}
        when = ("train", None) if metadata is None else (metadata.training_phase, metadata.global_step)
        engine, trains = config.inference_engine, when[0] == "train"
        kinds = [EXPERTS] * (trains and engine.enable_return_routed_experts)
        kinds += [SUPPORT] * (trains and engine.enable_return_sample_support_set)
        async with AsyncTurnlog(self._config.url, retry_for_s=PATIENCE_S) as turnlog:
            asked = zip(ids, prompts, extras, strict=True)
            played = await asyncio.gather(*(self._play(turnlog, when, sampling, kinds, *one) for one in asked))
        rows = [row for trajectory in played for row in trajectory]
        live = [row for row in rows if row["stop_reasons"] != ERROR]
        if not live and any(row["lacks"] for row in rows):
            raise ValueError(f"no row has {' and '.join(kinds)}: set TURNLOG_REPLAY, and what its engines need for it")
        metrics: dict[str, Any] = {"generate/num_error_trajectories": len(rows) - len(live)}
        if live:
            given = ([row[key] for row in live] for key in ("response_ids", "rewards"))
            seconds = [trajectory[-1]["seconds"] for trajectory in played]
            masks = [row["loss_masks"] for row in live]
            metrics |= get_rollout_metrics(*given, loss_masks=masks, trajectory_completion_times=seconds)
        for row in live:
            if config.zero_reward_on_non_stop and row["stop_reasons"] != "stop":
                row["rewards"] = [0.0] * len(row["rewards"]) if isinstance(row["rewards"], list) else 0.0
        _reward_masked(rows, by_turn=self._config.rewards == "turn", trains=trains)
        output = {key: [row[key] for row in rows] for key in (*MASKED, "rewards", "trajectory_ids", "is_last_step")}
        if config.apply_overlong_filtering:
            output["loss_masks"] = apply_overlong_filtering(output["loss_masks"], output["stop_reasons"])
        return GeneratorOutput(
            **output,
            rollout_metrics=metrics,
            trajectory_generation_times=[row["seconds"] for row in rows],
            trajectory_time_splits=None,
            rollout_expert_indices=self._experts(rows) if EXPERTS in kinds else None,
            rollout_sample_support=_support(rows, sampling["top_k"]) if SUPPORT in kinds else None,
            env_metrics=[{"session_id": row["session_id"]} for row in rows],
        )

    async def _play(
        self,
        turnlog: AsyncTurnlog,
        when: tuple[str, int | None],
        sampling: Mapping[str, Any],
        kinds: list[str],
        trajectory: TrajectoryID,
        prompt: Any,
        extras: Mapping[str, Any],
    ) -> list[Row]:
        """The rows of a trajectory, at least one."""
        config = self._config
        asked = self._asked.setdefault(when, Counter())
        if len(self._asked) > KEPT_STEPS:
            del self._asked[next(iter(self._asked))]
        again = asked[trajectory.to_string()]
        asked[trajectory.to_string()] += 1
        group = name_of(*when, trajectory.instance_id, *([again] if again else []))
        async with self._places:
            begun = time.monotonic()
            found, outcome = await rollout(
                config.agent,
                prompt,
                name=name_of(group, trajectory.repetition_id),
                shape="skyrl",
                command=config.command,
                sampling=sampling,
                metadata=extras,
                step=when[1],
                group_id=group,
                attempt=trajectory.repetition_id,
                evaluation=when[0] == "eval",
                timeout_s=config.timeout_s,
                failed=config.failed,  # type: ignore[arg-type]
                retry_failed=config.retry_failed,
                export={"rewards": config.rewards, "replay": bool(kinds)},
                turnlog=turnlog,
                run=config.run or default_run(),
                **config.session,
            )
        rows: list[Row] = [row for row in found if all(row.get(kind) is not None for kind in kinds)]
        name = f"trajectory {trajectory.to_string()} (session {outcome.session_id})"
        if len(rows) > 1 and not self._generator.step_wise_trajectories:
            raise ValueError(
                f"{name} has {len(rows)} rows: set generator.step_wise_trajectories=true; for an agent with one "
                "conversation also turnlog.session.history=linear turnlog.session.on_drift=reject will do"
            )
        if not rows:
            lacks = [f"{kind}: {row.get(kind + '_missing')}" for row in found for kind in kinds if not row.get(kind)]
            why = outcome.failed or lacks or f"{outcome.status}, and it has no reward or no sampled token"
            logger.error(f"{name} is masked: {why}")
            rows = [{**MASKED, "lacks": bool(lacks)}]
        told = {"trajectory_ids": trajectory, "session_id": outcome.session_id, "seconds": time.monotonic() - begun}
        return [{**row, **told, "is_last_step": place == len(rows)} for place, row in enumerate(rows, 1)]

    def _experts(self, rows: list[Row]) -> list[Any] | None:
        """A masked row has a row of zeros, as many as the last other one that was seen; None if none was."""
        routed = [
            None if one is None else compact_routed_expert_indices(np.array(one))
            for one in (row.get(EXPERTS) for row in rows)
        ]
        self._layers = next((one.shape[1:] for one in routed if one is not None), self._layers)
        if self._layers is None:
            return None
        return [np.zeros((1, *self._layers), np.uint8) if one is None else one for one in routed]


def _support(rows: list[Row], top_k: int) -> list[Any]:
    """[R, top_k] ids, -1 where a token was drawn from fewer."""
    found = []
    for row in rows:
        support = np.full((len(row["response_ids"]), top_k), SAMPLE_SUPPORT_PADDING, SAMPLE_SUPPORT_DTYPE)
        if given := row.get(SUPPORT):
            support[np.arange(top_k) < np.diff(given["offsets"])[:, None]] = given["ids"]
        found.append(support)
    return found


def _reward_masked(rows: list[Row], *, by_turn: bool, trains: bool) -> None:
    totals = defaultdict(list)
    for row in rows:
        if trains and row["is_last_step"] and row["stop_reasons"] != ERROR:
            totals[row["trajectory_ids"].instance_id].append(math.fsum(row["rewards"]) if by_turn else row["rewards"])
    for row in rows:
        if row["stop_reasons"] == ERROR:
            others = totals[row["trajectory_ids"].instance_id]
            mean = math.fsum(others) / len(others) if others else 0.0
            row["rewards"] = [mean] if by_turn else mean


class TurnlogExp(BasePPOExp):  # type: ignore[misc]
    """SkyRL's experiment, synchronous or with `trainer.fully_async.enabled`, with rollouts of Turnlog."""

    def get_generator(self, cfg: TurnlogTrainConfig, tokenizer: Any, inference_engine_client: Any) -> TurnlogGenerator:
        made = TurnlogGenerator(cfg.turnlog, cfg.generator)
        clears, engine = cfg.trainer.fully_async.clear_kv_cache_on_weight_sync, cfg.generator.inference_engine
        if cfg.trainer.fully_async.enabled and engine.enable_prefix_caching and not clears:
            logger.warning(
                "new trajectories use prefixes that engines cached with earlier weights: set "
                "trainer.fully_async.clear_kv_cache_on_weight_sync=true"
            )
        if cfg.turnlog.add_engines:
            if engine.enable_pd:
                raise ValueError(
                    "Turnlog cannot take SkyRL's prefill and decode engines as its own: set turnlog.add_engines=false "
                    "and give Turnlog the address of their router, or set generator.inference_engine.enable_pd=false"
                )
            asyncio.run(_register_engines(cfg.turnlog, inference_engine_client.server_urls))
        return made

    def get_trainer(self, **given: Any) -> RayPPOTrainer:
        trainer = (FullyAsyncRayPPOTrainer if self.cfg.trainer.fully_async.enabled else RayPPOTrainer)(**given)
        return told_versions(trainer, self.cfg.turnlog)


async def _register_engines(config: TurnlogConfig, server_urls: list[str]) -> None:
    """SkyRL's engines, and no others, are the run's. Where Turnlog itself is all that SkyRL knows, it has its own."""
    run = config.run or default_run()
    assert run is not None  # The generator has refused it.
    async with AsyncTurnlog(config.url, retry_for_s=PATIENCE_S) as turnlog:
        urls = {url.rstrip("/") for url in server_urls} - {turnlog.base_url}
        if not urls:
            return
        known = {one["url"]: one["run"] for one in await turnlog.engines()}
        for url in sorted(urls):
            if known.get(url, ...) != run:
                await take_engine(turnlog, url, run)
        for left in [url for url, whose in known.items() if whose == run and url not in urls]:
            with contextlib.suppress(NotFound):
                await turnlog.remove_engine(left)


def told_versions(trainer: RayPPOTrainer, config: TurnlogConfig) -> RayPPOTrainer:
    """The trainer, which tells Turnlog after each update of its weights the step that made them. It pauses its engines
    itself, and what Turnlog asks them meanwhile waits there."""
    if not config.add_engines:
        return trainer
    connect = trainer.init_weight_sync_state

    def connected() -> None:
        connect()
        update = trainer.dispatch.save_weights_for_sampler

        async def updated(*given: Any, **more: Any) -> None:
            await update(*given, **more)
            try:
                async with AsyncTurnlog(config.url, retry_for_s=PATIENCE_S) as turnlog:
                    await turnlog.resume_fleet(version=str(trainer.global_step), run=config.run or default_run())
            except TurnlogError as error:
                logger.warning(f"Turnlog was not told the weight version: {error}")

        trainer.dispatch.save_weights_for_sampler = updated

    trainer.init_weight_sync_state = connected
    return trainer


@ray.remote(num_cpus=1)  # type: ignore[untyped-decorator]
def train(experiment: type[BasePPOExp], cfg: TurnlogTrainConfig, told: dict[str, str]) -> None:
    os.environ.update(told)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # SkyRL's log would have a line for each request.
    experiment(cfg).run()


def main(experiment: type[BasePPOExp] = TurnlogExp) -> None:
    """As SkyRL's own, with `turnlog.…`, and the environment's `TURNLOG_…` on the node that trains."""
    words = [word for word in sys.argv[1:] if not word.startswith("trainer.override_entrypoint=")]
    cfg = TurnlogTrainConfig.from_cli_overrides(words)
    validate_cfg(cfg)
    initialize_ray(cfg)
    told = {name: value for name, value in os.environ.items() if name.startswith("TURNLOG_")}
    ray.get(train.remote(experiment, cfg, told))  # Ray's dashboard would show a runtime_env, and the token in it.


if __name__ == "__main__":
    import turnlog.integrations.skyrl as module  # Ray would send the classes of `__main__` along.

    module.main()
