"""The producer for TransferQueue with the real package in a Ray cluster, and verl's own replay buffer as the trainer.

Everything that can die is killed: the producer's process, Turnlog, and the queue's actors.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import random
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.stand import Stand, standing

from e2e.feeding import RowId, acknowledged, audit, closed, fill, made, produce, row_id
from turnlog import AsyncTurnlog

os.environ.setdefault("TQ_NUM_THREADS", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    missing = "see 'Trainers' packages' in CONTRIBUTING.md"
    ray = pytest.importorskip("ray", reason=missing)
    tq = pytest.importorskip("transfer_queue", reason=missing)
    replay = pytest.importorskip("verl.trainer.ppo.v1.replay_buffer", reason=missing, exc_type=ImportError)
    from transfer_queue import interface
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    from turnlog.integrations import transfer_queue

pytestmark = [pytest.mark.harness, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

GROUPS = [f"task_{number}" for number in range(60)]
KILLS = {"producer": 8, "Turnlog": 8, "queue": 2}
DEADLINE_S = 400.0
QUEUE_S = 4.0
"""How long a producer waits for a dead queue."""


class Trainer:
    """verl's replay buffer: takes a group at a time, reads its rows, clears them as after a step."""

    def __init__(self) -> None:
        tq.init()
        self.got: list[RowId] = []
        self._buffer = replay.ReplayBufferAsync(
            trainer_mode="separate_async",
            trainer_config=None,
            max_off_policy_threshold=None,
            max_off_policy_strategy="drop",
            sampler_kwargs={},
            poll_interval=0.01,
        )

    def step(self) -> bool:
        """Train on one group; False if there is none."""
        self._buffer._sync_metadata_from_transfer_queue()
        if not self._buffer.finished_keys["train"]:
            return False
        batch, _ = self._buffer.sample(global_steps=1, partition_id="train", batch_size=1)
        data = tq.kv_batch_get(keys=batch.keys, partition_id="train")
        for at in range(len(batch.keys)):
            self.got.append(row_id({"extra_fields": data[at]["extra_fields"]}))
        tq.kv_clear(keys=batch.keys, partition_id="train")
        return True

    def waiting(self) -> int:
        """Groups that it has not taken."""
        self._buffer._sync_metadata_from_transfer_queue()
        return len(self._buffer.finished_keys["train"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def queue(cluster: str) -> Iterator[str]:
    tq.init()
    yield cluster
    tq.close()
    gone()


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    with standing(tmp_path, "--seed", "5") as found:
        yield found


def end_queue() -> None:
    """kill -9 of its processes; then the trainer starts another, as a job that is started again does."""
    actors = [interface._TQ_CONTROLLER, *interface._TQ_STORAGE["SimpleStorage"].values()]
    for pid in [ray.get(actor.__ray_call__.remote(lambda self: os.getpid())) for actor in actors]:
        os.kill(pid, signal.SIGKILL)
    tq.close()
    gone()
    tq.init()


def gone() -> None:
    """Wait until the queue's name is free."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            ray.get_actor("TransferQueueController", namespace="transfer_queue")
        except ValueError:
            return
        time.sleep(0.05)
    raise AssertionError("the queue's actor lives on")


class Producer:
    """The module's `main` in a process of its own, started again whenever it is gone."""

    def __init__(self, stand: Stand, cluster: str, folder: Path, until: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["turnlog.integrations.transfer_queue"])
        self._arguments = ["--consumer", "trainer", "--url", stand.base_url, "--ray", cluster, "--until", until]
        self._arguments += ["--size", "2", "--timeout-s", str(QUEUE_S), "--poll-s", "0.05"]
        self._log = folder / "producer.log"
        self._read = 0
        self._process: Any = None

    def keep(self) -> None:
        if self._process is None or not self._process.is_alive():
            self._process = self._context.Process(target=produce, args=(self._arguments, str(self._log)), daemon=True)
            self._process.start()

    def has_put(self) -> bool:
        """Whether it said so since the last call."""
        before, self._read = self._read, self._log.stat().st_size if self._log.exists() else 0
        return self._read > before

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()


def test_the_columns_are_those_of_verls_agent_loops(stand: Stand) -> None:
    fill(stand, GROUPS[:1])
    for row in made(stand).values():
        own, theirs = transfer_queue.columns(row), AgentLoopOutput(**row).as_dict()
        assert own.keys() - theirs.keys() == {"input_ids", "position_ids", "loss_mask", "multi_modal_inputs"}
        for name, value in theirs.items():
            same = own[name] == value
            assert same if isinstance(same, bool) else same.all(), name
            assert not hasattr(value, "dtype") or own[name].dtype == value.dtype, name


class Died(Exception):
    pass


class Mortal(transfer_queue.TransferQueueProducer):
    """Dies at one of its requests to the queue: before it, or after it and before its answer."""

    def __init__(self, *arguments: Any, at: int, before: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._left, self._before = at, before

    async def _ask(self, request: Any) -> Any:
        self._left -= 1
        if self._left == 0 and self._before:
            request.close()
            raise Died
        answer = await super()._ask(request)
        if self._left == 0:
            raise Died
        return answer


@pytest.mark.parametrize("until", ["put", "cleared"])
@pytest.mark.parametrize("eager", [False, True], ids=["trainer waits", "trainer takes at once"])
def test_a_death_at_each_request(queue: str, stand: Stand, until: Any, eager: bool) -> None:
    """The trainer takes and clears what it sees, either between a death and the next producer, or at the end."""
    groups = GROUPS[:16]
    fill(stand, groups)
    trainer = Trainer()
    deaths = asyncio.run(_die_everywhere(stand, trainer, until, eager))
    assert deaths >= 8
    fed = audit(made(stand), acknowledged(stand), trainer.got)
    assert (fed.lost, fed.doubled, fed.acknowledged) == (0, 0, fed.rows)
    left = tq.kv_list("train").get("train", {})
    assert not left, "keys that nobody clears"


async def _die_everywhere(stand: Stand, trainer: Trainer, until: Any, eager: bool) -> int:
    deaths = 0
    async with AsyncTurnlog(stand.base_url) as turnlog:
        for at in range(1, 12):
            for before in (True, False):
                producer = Mortal(turnlog, consumer="trainer", until=until, size=1, at=at, before=before)
                try:
                    await producer.step()
                except Died:
                    deaths += 1
                while eager and trainer.step():
                    pass
        survivor = transfer_queue.TransferQueueProducer(turnlog, consumer="trainer", until=until, size=1, limit=2)
        before_limit = trainer.waiting()
        while await survivor.step() or trainer.step():
            assert trainer.waiting() <= max(2, before_limit)
        await survivor.step()
    return deaths


@pytest.mark.parametrize(
    ("victim", "until", "lossless"),
    [("producer", "put", True), ("Turnlog", "put", True), ("queue", "cleared", True), ("queue", "put", False)],
)
def test_random_kills(queue: str, stand: Stand, tmp_path: Path, victim: str, until: str, lossless: bool) -> None:
    """Kills at random moments of the producer's work, until every group is acknowledged and the trainer finds none."""
    dice = random.Random(18)
    fill(stand, GROUPS)
    expected = made(stand)
    trainer, producer = Trainer(), Producer(stand, queue, tmp_path, until)
    strike = {"producer": producer.kill, "Turnlog": lambda: restart(stand), "queue": end_queue}[victim]
    kills, due = 0, math.inf
    deadline = time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < deadline:
            producer.keep()
            if producer.has_put():
                due = min(due, time.monotonic() + dice.uniform(0.0, 0.8))
            if time.monotonic() >= due and kills < KILLS[victim]:
                strike()
                kills, due = kills + 1, math.inf
            elif not trainer.step():
                if len(closed(stand)) == len(GROUPS):
                    break
                time.sleep(0.02)
    finally:
        producer.kill()
    fed = audit(expected, acknowledged(stand), trainer.got)
    assert fed.acknowledged == fed.rows
    if lossless:
        assert fed.lost == 0
    if victim != "queue":  # which dies with the receipts of rows that the trainer had cleared
        assert fed.doubled == 0


def restart(stand: Stand) -> None:
    stand.server.kill()
    stand.server.start()
