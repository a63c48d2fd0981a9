"""TRL (1.16) on Turnlog: a rollout worker and a weight transfer for `AsyncGRPOTrainer`, a `rollout_func` for `GRPOTrainer`.

`TurnlogSessions` of `turnlog.integrations.openenv` is for TRL's `HarnessRolloutWorker`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample

from turnlog import AsyncTurnlog, Rollout, Turnlog, name_of, rollout
from turnlog.client.address import default_run
from turnlog.rollouts import load

log = logging.getLogger("turnlog.trl")

RETRY_FOR_S = 600.0
"""How long a server may be away before the trainer ends."""

FAILED_GROUPS = 16
"""So many groups in a row of which every rollout failed end the trainer: its agent does not work."""

STOP_S = 30.0


class TurnlogRolloutWorker(AsyncRolloutWorker):  # type: ignore[misc]  # TRL has no types
    """`rollout_worker` of `AsyncGRPOTrainer`: groups are played in a thread, every row of a rollout is a sample.

    dataset: what the trainer gets as `train_dataset`; its column `prompt` is the agent's prompt, the others are in its
        `metadata`. args: the trainer's: sampling, group size and limits are taken from them.
    failed: the samples of rollouts that failed: `keep`, or `drop`, and then their rewards count in no advantage either.
    options: more arguments of `rollout` (`run`, `command`, `timeout_s`, `retry_failed`, …) and of `create_session`.

    A rollout is named by the run, the number of its group in the endlessly repeated data set, its prompt and its
    attempt: started again, a trainer gets what was played. It is a subclass because the trainer keeps the place in the
    data set in its checkpoints for workers of TRL's own class alone.
    """

    model_version = 0

    def __init__(
        self,
        agent: Callable[..., Any] | str | None,
        dataset: Sequence[Mapping[str, Any]],
        args: Any,
        *,
        url: str | None = None,
        failed: str = "keep",
        **options: Any,
    ) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._loop_kwargs = {"dataset_start_index": 0}  # the trainer reads and writes it
        self._agent = agent if options.get("command") is not None else load(agent)
        self._dataset, self._args, self._url = dataset, args, url
        self._options = {"failed": failed, **options}
        self._life = _life(options)
        self._failed_groups = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._produce())
        ended = asyncio.wait([self._task])
        self._beat = time.monotonic()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(ended,), name="turnlog-rollouts", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Cancel what is played: it is played again by the next trainer of this run."""
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(STOP_S)
        self._thread = None

    def check_health(self, stale_after_s: float) -> None:
        if self._task.done():
            raise RuntimeError("the rollouts have ended") from self._task.exception()
        if (age := time.monotonic() - self._beat) > stale_after_s:
            raise RuntimeError(f"the rollouts' loop stands still for {age:.0f} s: an agent that blocks has to be `def`")

    async def _produce(self) -> None:
        slots = asyncio.Semaphore(max(1, self._args.max_inflight_tasks))
        async with AsyncTurnlog(self._url, retry_for_s=RETRY_FOR_S) as turnlog, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            start = self._loop_kwargs["dataset_start_index"]
            for number in itertools.count(start):
                example = self._dataset[number % len(self._dataset)]
                playing = []
                for attempt in range(self._args.num_generations):
                    await slots.acquire()
                    task = tasks.create_task(self._play(turnlog, number, attempt, example))
                    task.add_done_callback(lambda _: slots.release())
                    playing.append(task)
                tasks.create_task(self._deliver(number - start, playing))
                while self.rollout_buffer.full():
                    await asyncio.sleep(0.1)

    async def _tick(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(1.0)

    async def _play(
        self, turnlog: AsyncTurnlog, number: int, attempt: int, example: Mapping[str, Any]
    ) -> tuple[int, Rollout]:
        """The version of the weights when it began, and the rollout."""
        version, begun = self.model_version, time.monotonic()
        columns = {name: value for name, value in example.items() if name != "prompt"}
        group = (*self._life, "train", number, _digest(example["prompt"]))
        played = await rollout(
            self._agent,
            example["prompt"],
            name=name_of(*group, attempt),
            group_id=name_of(*group),
            attempt=attempt,
            step=version,
            metadata=columns,
            sampling=_sampling(self._args),
            turnlog=turnlog,
            **self._options,
        )
        rows, outcome = played
        turns = sum(any(row["loss_mask"][turn["output_start"] : turn["end"]]) for row in rows for turn in row["turns"])
        tokens = sum(sum(row["loss_mask"]) for row in rows)
        metrics = {
            "rollout/failed_total": float(outcome.failed is not None),
            "rollout/read_total": float(not outcome.played),
            "rollout/turns_mean": (turns, 1),
            "rollout/turns_max": float(turns),
            "rollout/samples_per_rollout": (len(rows), 1),
            "completions/mean_length": (tokens, 1),
            "completions/max_length": float(tokens),
            "completions/min_length": float(tokens),
            "completions/clipped_ratio": (float(outcome.status == "truncated"), 1),
        }
        if outcome.played:
            metrics["rollout/duration_s"] = time.monotonic() - begun
        self.metrics_queue.put(metrics)
        return version, played

    async def _deliver(self, group_id: int, playing: list[asyncio.Task[tuple[int, Rollout]]]) -> None:
        """Put the group's samples into the buffer. Raises RuntimeError if too many groups failed."""
        group = [await task for task in playing]
        self._failed_groups += 1
        for _, (_, outcome) in group:
            if outcome.failed is None:
                self._failed_groups = 0
        if self._failed_groups >= FAILED_GROUPS:
            said = group[-1][1].outcome
            raise RuntimeError(f"every rollout of {FAILED_GROUPS} groups failed, at last {said.failed}") from said.error
        is_kept = self._options["failed"] == "keep"
        rewards = [one.outcome.reward if is_kept or one.outcome.failed is None else None for _, one in group]
        advantages, std = _advantages(rewards)
        for (version, (rows, outcome)), reward, advantage in zip(group, rewards, advantages, strict=True):
            for row in rows:
                if not any(row["loss_mask"]):
                    continue
                components = {f"rewards/{name}": value for name, value in row["reward_components"].items()}
                sampled_with = [one for one, mask in zip(row["weight_versions"], row["loss_mask"], strict=True) if mask]
                if row["weight_version_names"]:  # no numbers: words of the engine's own, or unknown
                    sampled_with = [version if outcome.played else self.model_version]
                sample = RolloutSample(
                    prompt=[],
                    completion=row["messages"],
                    input_ids=np.asarray(row["tokens"], np.int64),
                    completion_mask=np.asarray(row["loss_mask"], np.int64),
                    old_log_probs=np.asarray(row["logprobs"], np.float32),
                    advantage=advantage,
                    model_version=min(*sampled_with, self.model_version),
                    group_id=group_id,
                    metrics={"reward": _number(reward), "reward_std": std, **components},
                )
                await self._put(sample)

    async def _put(self, sample: RolloutSample) -> None:
        begun = time.monotonic()
        while self.rollout_buffer.full():
            await asyncio.sleep(0.1)
        sample.enqueued_at = time.time()
        self.rollout_buffer.put_nowait(sample)
        if (waited := time.monotonic() - begun) > 0.1:
            self.metrics_queue.put({"rollout/backpressure_s": waited})


class TurnlogWeightTransfer:
    """`weight_transfer` of `AsyncGRPOTrainer`: Turnlog's gate is shut while the weights change, then the engines have
    the trainer's version.

    worker: the trainer's rollout worker, also TRL's own. transfer: what sends the weights: TRL's (`trainer.weight_transfer`), your
    own, or None where something else does. lease_s: after it the gate opens if the trainer has died.
    """

    def __init__(
        self, worker: AsyncRolloutWorker, transfer: Any = None, *, url: str | None = None, lease_s: float = 1800.0
    ) -> None:
        self._worker, self._transfer, self._lease_s = worker, transfer, lease_s
        self._turnlog = Turnlog(url, retry_for_s=RETRY_FOR_S)
        self._is_paused = False

    def init_weight_transfer(self) -> None:
        if self._transfer is not None:
            self._transfer.init_weight_transfer()

    def pause(self) -> None:
        self._turnlog.pause_fleet(mode="in_place", lease_s=self._lease_s)
        self._is_paused = True
        if self._transfer is not None:
            self._transfer.pause()

    def send_weights(self, iterator: Iterator[Any]) -> None:
        if self._transfer is not None:
            self._transfer.send_weights(iterator)
            return
        for _ in iterator:  # other ranks take part in each parameter
            pass

    def resume(self) -> None:
        if self._transfer is not None:
            self._transfer.resume()
        self._turnlog.resume_fleet(version=str(self._worker.model_version + 1))
        self._is_paused = False

    def destroy(self) -> None:
        if self._is_paused:
            self._turnlog.resume_fleet()
        if self._transfer is not None:
            self._transfer.destroy()
        self._turnlog.close()


class TurnlogRollouts:
    """`rollout_func` of `GRPOTrainer`: each prompt is a session, whose reward is the column `reward` of reward functions;
    `turnlog_reward` returns it.

    failed: of a rollout that failed: `keep` its row, or `drop`: no token of it is in the loss, and it has no reward.
    options: more arguments of `rollout` (`run`, `command`, `timeout_s`, `retry_failed`, …) and of `create_session`.

    `GRPOTrainer` takes one row a prompt: an agent that replaces its history is refused, unless `history="tree"` is
    given; then a rollout of several rows raises ValueError.
    """

    def __init__(
        self,
        agent: Callable[..., Any] | str | None = None,
        *,
        url: str | None = None,
        **options: Any,
    ) -> None:
        self._agent = agent if options.get("command") is not None else load(agent)
        self._url = url
        self._options = {"history": "linear", "on_drift": "reject", **options}
        self._life = _life(options)
        self._calls: dict[str, tuple[int, int]] = {}

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Raises RuntimeError if no rollout has a row, ValueError if one has several, and TurnlogError."""
        [self._life] = broadcast_object_list([self._life])  # one for all ranks
        is_training, step = trainer.model.training, trainer.state.global_step
        phase = "train" if is_training else "eval"
        last, calls = self._calls.get(phase, (step, -1))
        call = calls + 1 if last == step else 0
        self._calls[phase] = (step, call)
        size = trainer.num_generations if is_training else trainer.num_generations_eval
        first = trainer.accelerator.process_index * len(prompts)
        played = _run(self._play_all(prompts, (phase, step, call), first, size, trainer.args))
        if not any(rows for rows, _ in played):
            raise RuntimeError(f"no rollout of step {step} has a row: {played[0].outcome}") from played[0].outcome.error
        end = trainer.processing_class.eos_token_id
        absent = {"prompt_ids": [end], "completion_ids": [end], "logprobs": [0.0], "env_mask": [0], "reward": None}
        kept = [rows[0] if rows else absent for rows, _ in played]
        outcomes = [one.outcome for one in played]
        return {
            **{name: [row[name] for row in kept] for name in absent},
            "session_id": [outcome.session_id for outcome in outcomes],
            "status": [outcome.status for outcome in outcomes],
        }

    async def _play_all(
        self, prompts: list[Any], when: tuple[str, int, int], first: int, size: int, args: Any
    ) -> list[Rollout]:
        """This rank's: TRL repeats each prompt for its group, so a place among all ranks' prompts tells the attempt."""
        async with AsyncTurnlog(self._url, retry_for_s=RETRY_FOR_S) as turnlog, asyncio.TaskGroup() as tasks:
            playing = []
            for place, prompt in enumerate(prompts, first):
                group = (*self._life, *when, place // size, _digest(prompt))
                playing.append(
                    tasks.create_task(
                        rollout(
                            self._agent,
                            prompt,
                            name=name_of(*group, place % size),
                            shape="trl",
                            group_id=name_of(*group),
                            attempt=place % size,
                            step=when[1],
                            evaluation=when[0] == "eval",
                            sampling=_sampling(args),
                            turnlog=turnlog,
                            **self._options,
                        )
                    )
                )
        played = [task.result() for task in playing]
        for rows, outcome in played:
            if len(rows) > 1:
                raise ValueError(f"session {outcome.session_id} has {len(rows)} rows; GRPOTrainer takes one")
        return played


def turnlog_reward(completions: list[Any], reward: list[float | None], **columns: Any) -> list[float | None]:
    """`reward_funcs` of `GRPOTrainer`: the rewards that the agents set; None is none."""
    return reward


def _life(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The beginning of all names: nothing in a named run, else something that no other process has."""
    if (options.get("run") or default_run()) not in (None, "default"):
        return ()
    log.warning("no run is named (run=, TURNLOG_RUN): started again, this training plays its rollouts again")
    return (uuid.uuid4().hex[:12],)


def _digest(prompt: Any) -> str:
    """A data set may change between two starts."""
    return sha256(json.dumps(prompt, default=str, sort_keys=True).encode()).hexdigest()[:12]


def _sampling(args: Any) -> dict[str, Any]:
    """What changes nothing is left out, so that a client of OpenAI's takes it."""
    penalty = args.repetition_penalty
    return {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": None if penalty == 1.0 else penalty,
        "max_tokens": args.max_completion_length,
        "chat_template_kwargs": args.chat_template_kwargs,
    }


def _number(reward: float | None) -> float:
    return float("nan") if reward is None else reward


def _advantages(rewards: list[float | None]) -> tuple[list[float], float]:
    """As TRL's worker computes them, 0.0 without a reward; and the rewards' standard deviation."""
    found = np.array([_number(reward) for reward in rewards])
    is_scored = ~np.isnan(found)
    advantages = np.zeros_like(found)
    if not is_scored.any():
        return advantages.tolist(), float("nan")
    scored = found[is_scored]
    advantages[is_scored] = (scored - scored.mean()) / (scored.std() + 1e-8)
    return advantages.tolist(), float(scored.std())


def _run(playing: Any) -> Any:
    """The result; in a notebook this thread has a loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(playing)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, playing).result()
