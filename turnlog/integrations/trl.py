"""TRL (1.16) on Turnlog: a rollout worker and a weight transfer of `AsyncGRPOTrainer`, `rollout_func` of `GRPOTrainer`.

`TurnlogSessions` of `turnlog.integrations.openenv` is for TRL's `HarnessRolloutWorker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from accelerate.utils import broadcast_object_list, gather_object
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample

from turnlog import AsyncTurnlog, Rollout, Turnlog, name_of, rollout
from turnlog.rollouts import PATIENCE_S, Outcome, life, load

log = logging.getLogger("turnlog.trl")

R = TypeVar("R")
Array = npt.NDArray[np.float64]

FAILED_GROUPS = 16
"""So many groups in a row of which every rollout failed or has no turn end the trainer: its agent does not work. Those
that are only read do not count, or a trainer that is started again would end at once."""

FAILED_CALLS = 3
"""Of `GRPOTrainer`: so many batches in a row, on all ranks."""

STOP_S = 30.0


class TurnlogRolloutWorker(AsyncRolloutWorker):  # type: ignore[misc, unused-ignore]  # Any where TRL is absent
    """`rollout_worker` of `AsyncGRPOTrainer`: plays groups in a thread; each row of a rollout is a sample.

    dataset: the trainer's; its column `prompt` is the agent's prompt, the others are in `metadata`. args: the
        trainer's, for sampling, group size and limits. failed: what becomes of rollouts that failed; the rewards of
        dropped ones count in no advantage. options: more of `rollout` (`run`, `command`, …) and `create_session`.

    A rollout is named by the run, its group's place in the repeated data set, its prompt and its attempt. A subclass,
    because the trainer keeps that place in its checkpoints for workers of TRL's own class alone.
    """

    model_version = 0

    def __init__(
        self,
        agent: Callable[..., Any] | str | None,
        dataset: Sequence[Mapping[str, Any]],
        args: Any,
        *,
        url: str | None = None,
        failed: Literal["keep", "drop"] = "keep",
        **options: Any,
    ) -> None:
        self.rollout_buffer: Any = queue.Queue(args.queue_maxsize)
        self.metrics_queue: Any = queue.Queue()
        self._loop_kwargs = {"dataset_start_index": 0}  # The trainer reads and writes it.
        self._agent = agent if options.get("command") is not None else load(agent)
        self._dataset, self._args, self._url = dataset, args, url
        self._failed, self._options, self._life = failed, options, life(options.get("run"))
        self._failed_groups = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._beat = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._produce())
        run, ended = self._loop.run_until_complete, asyncio.wait([self._task])
        self._thread = threading.Thread(target=run, args=(ended,), name="turnlog-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cancel what is played; the next trainer of this run plays it again."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(STOP_S)

    def check_health(self, stale_after_s: float) -> None:
        if self._task.done():
            raise RuntimeError("the rollouts have ended") from self._task.exception()
        if (age := time.monotonic() - self._beat) > stale_after_s:
            raise RuntimeError(
                f"an agent has blocked the event loop of the rollouts for {age:.0f} s: make it `def`, not `async def`"
            )

    async def _produce(self) -> None:
        slots = asyncio.Semaphore(max(1, self._args.max_inflight_tasks))
        start = self._loop_kwargs["dataset_start_index"]
        async with AsyncTurnlog(self._url, retry_for_s=PATIENCE_S) as turnlog, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            for number in itertools.count(start):
                example = self._dataset[number % len(self._dataset)]
                playing = []
                for attempt in range(self._args.num_generations):
                    await slots.acquire()
                    playing.append(tasks.create_task(self._play(turnlog, number, attempt, example)))
                    playing[-1].add_done_callback(lambda _: slots.release())
                tasks.create_task(self._deliver(number - start, playing))
                await self._room()

    async def _tick(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(1.0)

    async def _room(self) -> None:
        """Wait while the buffer is full."""
        begun = time.monotonic()
        while True:
            if not self.rollout_buffer.full():
                break
            await asyncio.sleep(0.1)
        if (waited := time.monotonic() - begun) > 0.1:
            self.metrics_queue.put({"rollout/backpressure_s": waited})

    async def _play(
        self, turnlog: AsyncTurnlog, number: int, attempt: int, example: Mapping[str, Any]
    ) -> tuple[int, Rollout]:
        """The weights' version when it began, if it was played now, and the rollout."""
        version, begun = self.model_version, time.monotonic()
        group = (*self._life, "train", number, _digest(example["prompt"]))
        played = await rollout(
            self._agent,
            example["prompt"],
            name=name_of(*group, attempt),
            shape="trl-async",
            sampling=_sampling(self._args),
            metadata={name: value for name, value in example.items() if name != "prompt"},
            step=version,
            group_id=name_of(*group),
            attempt=attempt,
            failed=self._failed,
            turnlog=turnlog,
            **self._options,
        )
        rows, outcome = played
        told = {
            "rollout/failed_total": float(outcome.failed is not None),
            "rollout/read_total": float(not outcome.played),
            "rollout/samples_per_rollout": (len(rows), 1),
            "completions/mean_length": (sum(sum(row["completion_mask"]) for row in rows), 1),
            "completions/clipped_ratio": (float(outcome.status == "truncated"), 1),
        }
        if not outcome.played:
            self.metrics_queue.put(told)
            return self.model_version, played
        self.metrics_queue.put({**told, "rollout/duration_s": time.monotonic() - begun})
        return version, played

    async def _deliver(self, group_id: int, playing: list[asyncio.Task[tuple[int, Rollout]]]) -> None:
        """Put the group's samples into the buffer. Raises RuntimeError if too many groups failed."""
        group = [await task for task in playing]
        outcomes = [outcome for _, (_, outcome) in group]
        self._failed_groups = _failures(self._failed_groups, [(len(rows), outcome) for _, (rows, outcome) in group])
        if self._failed_groups == FAILED_GROUPS:
            said = f"every rollout of {FAILED_GROUPS} groups failed or has no turn, at last: {outcomes[-1]}"
            raise RuntimeError(said) from outcomes[-1].error
        is_kept = self._failed == "keep"
        rewards = np.array([one.reward if is_kept or one.failed is None else None for one in outcomes], float)
        advantages, std = _advantages(rewards)
        for (version, (rows, outcome)), reward, advantage in zip(group, rewards, advantages, strict=True):
            result = outcome.result if isinstance(outcome.result, dict) else {}
            parts = {f"rewards/{name}": part for name, part in (result.get("reward_components") or {}).items()}
            for row in rows:
                oldest = row["model_version"]  # None: the engine's versions are no numbers.
                sample = RolloutSample(
                    prompt=row["prompt"],
                    completion=row["completion"],
                    input_ids=np.asarray(row["input_ids"], np.int64),
                    completion_mask=np.asarray(row["completion_mask"], np.int64),
                    old_log_probs=np.asarray(row["old_log_probs"], np.float32),
                    advantage=float(advantage),
                    model_version=min(version if oldest is None else oldest, self.model_version),
                    group_id=group_id,
                    metrics={**row["metrics"], **parts, "reward": float(reward), "reward_std": std},
                )
                await self._room()
                sample.enqueued_at = time.time()
                self.rollout_buffer.put_nowait(sample)


class TurnlogWeightTransfer:
    """`weight_transfer` of `AsyncGRPOTrainer`: turns wait while the weights change, then have the trainer's version.

    worker: the trainer's rollout worker, TRL's own too. transfer: what sends the weights: TRL's `WeightTransferClient`,
        an object of your own, or None where something else does. options: of `Turnlog.weights`; by default all turns
        wait (`run="*"`), and vLLM keeps its generations (`mode="in_place"`), as TRL's own does.
    """

    def __init__(
        self, worker: AsyncRolloutWorker, transfer: Any = None, *, url: str | None = None, **options: Any
    ) -> None:
        self._worker, self._transfer = worker, transfer
        self._turnlog = Turnlog(url, retry_for_s=PATIENCE_S)
        self._options = {"run": "*", "mode": "in_place", **options}
        self._paused = contextlib.ExitStack()

    @classmethod
    def around(cls, trainer: Any, **options: Any) -> TurnlogWeightTransfer:
        """Around the transfer that `AsyncGRPOTrainer` has made. Raises ValueError if it uses none, because it has vLLM
        load LoRA adapters: agents would sample the base model."""
        if trainer._lora_sync:
            raise ValueError(
                "the trainer sends a LoRA adapter, under a name that no agent has: start vLLM without "
                "--enable-lora, and it sends the weights with the adapter in them"
            )
        return cls(trainer.rollout_worker, trainer.weight_transfer, **options)

    def init_weight_transfer(self) -> None:
        if self._transfer is not None:
            self._transfer.init_weight_transfer()

    def pause(self) -> None:
        version = self._worker.model_version + 1  # The trainer's, once it has resumed.
        self._paused.enter_context(self._turnlog.weights(version, **self._options))
        if self._transfer is not None:
            self._transfer.pause()

    def send_weights(self, iterator: Iterator[Any]) -> None:
        if self._transfer is not None:
            self._transfer.send_weights(iterator)
            return
        for _ in iterator:  # The other ranks take part in each.
            pass

    def resume(self) -> None:
        if self._transfer is not None:
            self._transfer.resume()
        self._paused.close()

    def destroy(self) -> None:
        """Between `pause` and `resume` too, after an error: the version then stays as it was."""
        ended = RuntimeError("the trainer ended while the weights changed")
        with contextlib.suppress(RuntimeError):
            self._paused.__exit__(RuntimeError, ended, None)
        self._turnlog.close()
        if self._transfer is not None:
            self._transfer.destroy()


class TurnlogRollouts:
    """`rollout_func` of `GRPOTrainer`: each prompt is a session, whose row it returns; `turnlog_reward` is its reward.

    options: more of `rollout` (`run`, `command`, `timeout_s`, `failed`, …) and of `create_session`. A rollout without a
        row, or one that failed with `failed="drop"`, has no token in the loss and no reward.
    `GRPOTrainer` takes one row a prompt, so an agent that replaces its history is refused. With `history="tree"` it is
    not, and a rollout of several rows raises ValueError.
    """

    def __init__(
        self, agent: Callable[..., Any] | str | None = None, *, url: str | None = None, **options: Any
    ) -> None:
        self._agent = agent if options.get("command") is not None else load(agent)
        self._url, self._life = url, life(options.get("run"))
        self._options = {"history": "linear", "on_drift": "reject", **options}
        self._calls: Counter[tuple[str, int]] = Counter()
        self._failed_calls = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Raises, on all ranks, RuntimeError if too many batches failed and ValueError if a rollout has several rows;
        and TurnlogError."""
        [self._life] = broadcast_object_list([self._life])  # One for all ranks.
        is_training, step = trainer.model.training, trainer.state.global_step
        phase, size = ("train", trainer.num_generations) if is_training else ("eval", trainer.num_generations_eval)
        self._calls[phase, step] += 1
        when = (*self._life, phase, step, self._calls[phase, step])
        playing = []
        # TRL repeats each prompt for its group, so a prompt's place in all ranks' lists says its attempt.
        for place, prompt in enumerate(prompts, trainer.accelerator.process_index * len(prompts)):
            group = name_of(*when, place // size, _digest(prompt))
            told = {"group_id": group, "attempt": place % size, "step": step, "evaluation": not is_training}
            playing.append({"prompt": prompt, "name": name_of(group, place % size), **told})
        played = _run(self._play(playing, _sampling(trainer.args)))
        # The ranks go on together or end together: one that raised alone would leave the others waiting for it.
        of_all = gather_object([(len(rows), one._replace(result=None, error=None)) for rows, one in played])
        for rows, outcome in of_all:
            if rows > 1:
                raise ValueError(f"session {outcome.session_id} has {rows} rows; GRPOTrainer takes one")
        self._failed_calls = _failures(self._failed_calls, of_all)
        if self._failed_calls == FAILED_CALLS:
            said = f"every rollout of {FAILED_CALLS} batches failed or has no turn, at last: {played[-1].outcome}"
            raise RuntimeError(said) from played[-1].outcome.error
        end = trainer.processing_class.eos_token_id
        absent = {"prompt_ids": [end], "completion_ids": [end], "logprobs": [0.0], "env_mask": [0], "reward": None}
        found = [rows[0] if rows else absent for rows, _ in played]
        return {
            **{name: [row[name] for row in found] for name in absent},
            "session_id": [outcome.session_id for _, outcome in played],
            "status": [outcome.status for _, outcome in played],
        }

    async def _play(self, playing: list[dict[str, Any]], sampling: dict[str, Any]) -> list[Rollout]:
        try:
            async with AsyncTurnlog(self._url, retry_for_s=PATIENCE_S) as turnlog, asyncio.TaskGroup() as tasks:
                common = {"shape": "trl", "sampling": sampling, "turnlog": turnlog, **self._options}
                made = [tasks.create_task(rollout(self._agent, **one, **common)) for one in playing]
        except ExceptionGroup as raised:
            raise raised.exceptions[0] from None
        return [task.result() for task in made]


def turnlog_reward(completions: list[Any], reward: list[float | None], **columns: Any) -> list[float | None]:
    """In `reward_funcs` of `GRPOTrainer`: what the agents rewarded; None is no reward."""
    return reward


def _failures(before: int, rollouts: Sequence[tuple[int, Outcome]]) -> int:
    """How many groups in a row gave nothing to train on, with this one: the number of rows of each of its rollouts, and
    what became of it."""
    if any(rows and (outcome.failed is None or outcome.reward is not None) for rows, outcome in rollouts):
        return 0
    return before + any(outcome.played for _, outcome in rollouts)


def _digest(prompt: Any) -> str:
    """A data set may change between two starts of a run."""
    return sha256(json.dumps(prompt, default=str, sort_keys=True).encode()).hexdigest()[:12]


def _sampling(args: Any) -> dict[str, Any]:
    """A penalty that does nothing is left out, because clients of OpenAI's do not know it."""
    said = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p", "chat_template_kwargs")}
    penalty = args.repetition_penalty if args.repetition_penalty != 1.0 else None
    return {**said, "max_tokens": args.max_completion_length, "repetition_penalty": penalty}


def _advantages(rewards: Array) -> tuple[Array, float]:
    """As TRL's own worker computes them, 0 where there is no reward; and the rewards' standard deviation."""
    is_scored = ~np.isnan(rewards)
    advantages = np.zeros_like(rewards)
    if not is_scored.any():
        return advantages, float("nan")
    scored = rewards[is_scored]
    advantages[is_scored] = (scored - scored.mean()) / (scored.std() + 1e-8)
    return advantages, float(scored.std())


def _run(playing: Coroutine[Any, Any, R]) -> R:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        is_in_a_notebook = False
    else:
        is_in_a_notebook = True
    if not is_in_a_notebook:
        return asyncio.run(playing)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, playing).result()
