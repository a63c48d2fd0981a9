"""SkyRL's generator with the real package, while the trainer and Turnlog are killed."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from integration.stand import Stand, standing, until

from e2e.feeding import audit
from turnlog import AsyncSession, AsyncTurnlog

pytestmark = [pytest.mark.harness, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

TASKS, ATTEMPTS, KILLS = 6, 4, 8
ADAPTERS = {
    "skyrl": (
        "skyrl.train.generators.base",
        "turnlog.integrations.skyrl",
        ["turnlog.integrations.skyrl", "openai", "skyrl.train.utils.trainer_utils"],
        "prompt_token_ids",
        "rewards",
    ),
}
"""The package's module, the adapter, what a trainer's process has loaded, and a row's columns."""
IDS = [(f"task_{task}", attempt) for task in range(TASKS) for attempt in range(ATTEMPTS)]


async def play(session: AsyncSession, *_: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": f"What is 6 times 7, {session.id}?"}]
    async with session.openai() as client:
        for follow_up in ("Are you sure?", None):
            reply = await client.chat.completions.create(model="simulator", messages=messages)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            if follow_up:
                messages.append({"role": "user", "content": follow_up})
    await session.set_reward(1.0)


async def skyrl_batch(url: str) -> list[list[int]]:
    from skyrl.train.generators.base import BatchMetadata, GeneratorInput, TrajectoryID
    from skyrl.train.utils.trainer_utils import validate_generator_output

    from turnlog.integrations.skyrl import TurnlogGenerator

    given = GeneratorInput(
        prompts=[[] for _ in IDS],
        env_classes=["turnlog"] * len(IDS),
        env_extras=None,
        sampling_params=None,
        trajectory_ids=[TrajectoryID(*one) for one in IDS],
        batch_metadata=BatchMetadata(global_step=3, training_phase="train"),
    )
    async with AsyncTurnlog(url, retry_for_s=60) as turnlog:
        output = await TurnlogGenerator(turnlog, play, run="run").generate(given)
    validate_generator_output(len(IDS), output)
    assert [(one.instance_id, one.repetition_id) for one in output["trajectory_ids"]] == IDS
    assert len(output["trajectory_generation_times"]) == len(IDS)
    both = zip(output["prompt_token_ids"], output["response_ids"], strict=True)
    return [prompt + response for prompt, response in both]


def train(adapter: str, url: str, result: str) -> None:
    """In the trainer's process: one batch."""
    os.environ["TURNLOG_URL"] = url
    batch = asyncio.run({"skyrl": skyrl_batch}[adapter](url))
    Path(result).write_text(json.dumps(batch))


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    with standing(tmp_path, "--seed", "5", "--latency-ms", "150") as found:
        yield found


def begun(stand: Stand, trainer: Any) -> None:
    """Wait until the trainer has asked the engine for something."""
    before = stand.stats()["started"]
    until(lambda: stand.stats()["started"] > before or not trainer.is_alive(), 60)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_batch_over_kills(stand: Stand, tmp_path: Path, adapter: str) -> None:
    package, module, preloaded, prompt, reward = ADAPTERS[adapter]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(package, reason="see 'Trainers' packages' in CONTRIBUTING.md", exc_type=ImportError)
        import_module(module)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded)
    dice, result, kills = random.Random(7), tmp_path / "batch.json", 0
    while not result.exists():
        trainer = context.Process(target=train, args=(adapter, stand.base_url, str(result)), daemon=True)
        trainer.start()
        if kills < KILLS:
            begun(stand, trainer)
            trainer.join(dice.uniform(0.0, 0.6))
            stand.server.kill()
            stand.server.start()
            trainer.join(dice.uniform(0.0, 0.6))
            trainer.kill()
            kills += 2
        trainer.join()
    made = [tuple(row[prompt] + row["response_ids"]) for row in stand.rows(shape=adapter) if row[reward] is not None]
    got = [tuple(ids) for ids in json.loads(result.read_text())]
    fed = audit(made, got, got)
    assert (len(made), fed.lost, fed.doubled) == (len(set(made)), 0, 0)
