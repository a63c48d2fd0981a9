"""TRL's own trainers on Turnlog: real steps on the CPU, compared with what the engine said and the agents did."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from trainers.stand import Sequenced, TrainerStand, judge, trainer_stand
from turnlog import Turnlog
from turnlog.errors import InvalidRequest

missing = "see 'Trainers' packages' in CONTRIBUTING.md"
for package in ("torch", "trl", "datasets", "openai"):
    pytest.importorskip(package, reason=missing, exc_type=ImportError)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.async_grpo import async_rollout_worker

    from trainers import trl_training as training
    from turnlog.integrations.trl import TurnlogWeightTransfer

pytestmark = [pytest.mark.harness, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

OF_A_GROUP = {0: 2, 1: 2, 2: 1, 3: 2}
"""How many generations each attempt makes."""

COMMAND = """
import json, os, openai
told = json.load(open(os.environ["TURNLOG_ROLLOUT"]))
reply = openai.OpenAI(max_retries=20).chat.completions.create(
    model="simulator", messages=told["prompt"], extra_body=told["request_kwargs"]
)
said = {"session_id": os.environ["TURNLOG_SESSION_ID"], "group_id": told["metadata"]["group_id"], "reward": 0.5}
print(json.dumps(said), file=open(os.environ["TURNLOG_TEST_PLAYED"], "a"))
print(0.5)
"""


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerStand]:
    """Its engine names no weight versions, as vLLM's."""
    with trainer_stand(tmp_path, "--silent-versions", "--latency-ms", "40", dialect="vllm") as made:
        monkeypatch.setenv("TURNLOG_URL", made.url)
        monkeypatch.setenv("TURNLOG_RUN", "of-a-test")
        monkeypatch.setenv(training.PLAYED, str(tmp_path / "played"))
        yield made


def played(folder: Path) -> list[dict[str, Any]]:
    file = folder / "played"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def killed(stand: TrainerStand, folder: Path) -> threading.Thread:
    """Kills the server when some rollouts have ended and others are played."""

    def work() -> None:
        while len(played(folder)) < 3:
            time.sleep(0.01)
        stand.kill()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def expected(rewards: list[float | None], spread: Callable[[list[float]], float], least: float) -> list[float]:
    """Each reward's advantage; None has none."""
    known = [one for one in rewards if one is not None]
    mean, deviation = statistics.fmean(known), spread(known) if len(known) > 1 else 0.0
    return [0.0 if one is None else (one - mean) / (deviation + least) for one in rewards]


def sequenced(sample: Any) -> Sequenced:
    lists = (sample.input_ids, sample.completion_mask, sample.old_log_probs)
    return Sequenced(*(one.tolist() for one in lists))


def check_samples(trainer: Any, stand: TrainerStand, rewards: dict[int, list[float | None]], unused: int) -> None:
    """`rewards` are by group, of its attempts."""
    samples = trainer.rollout_queue.samples
    judge(map(sequenced, samples), stand.generations(), unused=unused, tolerance=1e-5)
    for sample in samples:
        known = rewards[sample.group_id]
        reward = None if sample.metrics["reward"] != sample.metrics["reward"] else sample.metrics["reward"]
        advantages = dict(zip(known, expected(known, statistics.pstdev, 1e-8), strict=True))
        assert sample.advantage == pytest.approx(advantages[reward], abs=1e-6)
        assert 1 <= sample.model_version <= trainer.model_version
    for step, terms in enumerate(trainer.terms):
        of_step = samples[4 * step : 4 * (step + 1)]
        taken = [
            (logprob, sample.advantage)
            for sample in of_step
            for logprob, mask in zip(sample.old_log_probs.tolist(), sample.completion_mask.tolist(), strict=True)
            if mask
        ]
        assert list(chain(*sorted(terms))) == pytest.approx(list(chain(*sorted(taken))), abs=1e-6)


def test_asynchronous_steps_over_a_kill_of_the_server(stand: TrainerStand, tmp_path: Path) -> None:
    trainer = training.async_trainer(tmp_path, max_steps=4, max_inflight_tasks=4, queue_maxsize=4)
    killer = killed(stand, tmp_path)
    trainer.train()
    killer.join()
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3, 4]
    rewards: dict[int, dict[int, Any]] = defaultdict(dict)
    for line in played(tmp_path):
        _, _, number, _, attempt = line["session_id"].split(":")
        rewards[int(number)][int(attempt.partition(".")[0])] = line["reward"]
    known = {number: [found[attempt] for attempt in sorted(found)] for number, found in rewards.items()}
    samples = trainer.rollout_queue.samples
    counts = defaultdict(int)
    for sample in samples:
        counts[sample.group_id] += 1
    whole = [number for number, count in counts.items() if count == 5]
    assert len(whole) >= 2
    unused = len(stand.generations()) - len(whole) * sum(OF_A_GROUP.values())
    check_samples(trainer, stand, known, unused)
    assert {sample.model_version for sample in samples} > {1}
    assert trainer.state.log_history[0]["rollout/failed_total"] >= 1


def test_a_harness_of_openenv(stand: TrainerStand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own worker, which wants vLLM to be installed and asks it for nothing."""
    pytest.importorskip("openenv.core.harness.training", reason=missing, exc_type=ImportError)
    from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

    from turnlog.integrations.openenv import TurnlogSessions

    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)

    tokenizer = training.tokenizer()
    tokenizer.response_schema = {}  # TRL's own worker wants one, for tools that it calls itself.

    def worker(args: Any) -> HarnessRolloutWorker:
        return HarnessRolloutWorker(
            harness_session_factory=partial(
                TurnlogSessions, "trainers.trl_training:agent", params={"max_tokens": 24}, retry_failed=0
            ),
            model_name="simulator",
            dataset=training.dataset(),
            reward_funcs=[],
            processing_class=tokenizer,
            eos_token_ids=[1],
            num_generations=args.num_generations,
            max_inflight_tasks=8,
        )

    trainer = training.async_trainer(tmp_path, worker)
    trainer.train()
    rewards: dict[int, list[float | None]] = defaultdict(list)
    for line in played(tmp_path):
        rewards[int(line["group_id"].rpartition(":")[2])].append(line["reward"])
    samples = trainer.rollout_queue.samples
    check_samples(trainer, stand, rewards, unused=len(stand.generations()) - len(samples))
    assert len(samples) >= 8


@pytest.mark.parametrize("agent", ["a function", "a command"])
def test_synchronous_steps_over_a_kill_of_the_server(stand: TrainerStand, tmp_path: Path, agent: str) -> None:
    is_command = agent == "a command"
    given = {"agent": None, "command": (sys.executable, "-c", COMMAND)} if is_command else {}
    trainer = training.trainer(tmp_path, **given)
    killer = killed(stand, tmp_path)
    trainer.train()
    killer.join()
    rewards = {line["session_id"]: line["reward"] for line in played(tmp_path)}
    rows = []
    assert len(trainer.batches) == 2
    for made, inputs in trainer.batches:
        known = [rewards[one["session_id"]] for one in inputs]
        assert [one["reward"] for one in inputs] == known
        assert [one["status"] for one in inputs] == ["failed" if one is None else "truncated" for one in known]
        assert made["advantages"].tolist() == pytest.approx(expected(known, statistics.stdev, 1e-4), abs=1e-5)
        for place in range(len(inputs)):
            prompt = made["prompt_ids"][place][made["prompt_mask"][place].bool()].tolist()
            is_there = made["completion_mask"][place].bool()
            names = ("completion_ids", "tool_mask", "sampling_per_token_logps")
            completion, mask, logprobs = (made[name][place][is_there].tolist() for name in names)
            before = [0] * len(prompt)
            rows.append(Sequenced(prompt + completion, before + mask, [0.0, *before[1:], *logprobs]))
    expects = 8 if is_command else 2 * sum(OF_A_GROUP.values())
    judge(rows, stand.generations(), unused=len(stand.generations()) - expects, tolerance=1e-5)


@pytest.mark.parametrize(
    ("make", "told"),
    [(training.async_trainer, "the rollouts have ended"), (training.trainer, "every rollout of 3 batches failed")],
)
def test_an_agent_that_never_works_ends_the_trainer_until_it_works(
    stand: TrainerStand, tmp_path: Path, make: Callable[..., Any], told: str
) -> None:
    trainer = make(tmp_path, agent="trainers.trl_training:broken", max_steps=4)
    with pytest.raises(RuntimeError, match=told):
        trainer.train()
    with Turnlog(stand.url) as turnlog:
        failed = {one["session_id"] for one in turnlog.sessions() if (one["failed"] or {}).get("kind") == "agent"}
    assert failed
    again = make(tmp_path, max_steps=4)
    again.train()
    assert [entry["step"] for entry in again.state.log_history if "loss" in entry] == [1, 2, 3, 4]
    assert all(weights.isfinite().all() for weights in again.model.parameters())
    assert not failed & {line["session_id"] for line in played(tmp_path)}


def test_a_rollout_of_several_rows_and_a_refusal_of_the_server_are_named(stand: TrainerStand, tmp_path: Path) -> None:
    trainer = training.trainer(tmp_path, training.AGENT, session={"history": "tree", "on_drift": "segment"})
    with pytest.raises(ValueError, match="has 2 rows; GRPOTrainer takes one"):
        trainer.train()
    with pytest.raises(InvalidRequest):
        training.trainer(tmp_path, session={"group_size": -1}).train()


def test_a_transfer_of_adapters_alone_is_refused(stand: TrainerStand, tmp_path: Path) -> None:
    """TRL finds out of vLLM what it will send."""
    trainer = training.async_trainer(tmp_path)
    trainer.weight_transfer = None
    around = TurnlogWeightTransfer.around(trainer)
    around.destroy()
    trainer._lora_sync = True
    with pytest.raises(ValueError, match="without --enable-lora"):
        TurnlogWeightTransfer.around(trainer)


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_trainer_that_is_killed_goes_on_and_plays_nothing_twice(
    stand: TrainerStand, tmp_path: Path, kind: str
) -> None:
    words = [sys.executable, "-m", "trainers.trl_training", kind, str(tmp_path), "4"]
    tests = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((tests, str(Path(tests).parent)))}
    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        while not (tmp_path / "out" / "checkpoint-1" / "trainer_state.json").exists():
            assert first.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        count = len(played(tmp_path))
        while len(played(tmp_path)) < count + 2:
            assert first.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.001)
        first.send_signal(signal.SIGKILL)
        first.wait()
    before = {line["session_id"] for line in played(tmp_path)}
    with Turnlog(stand.url) as turnlog:
        states = {name: turnlog.attach(name).state() for name in before}
    said = {name: [one["value"]["ended"] for one in state["annotations"]["0"]] for name, state in states.items()}
    ended = {name for name, [has_ended] in said.items() if has_ended}
    assert len(ended) >= 4
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again = [line["session_id"] for line in played(tmp_path)][len(before) :]
    assert again
    assert not {name.rpartition(".")[0] for name in again} & {name.rpartition(".")[0] for name in ended}
    last = sorted((tmp_path / "out").glob("checkpoint-*"))[-1]
    logged = json.loads((last / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in logged] == [1, 2, 3, 4]
    if kind == "async":
        assert sum(entry.get("rollout/read_total", 0) for entry in logged) >= 1
