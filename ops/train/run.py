"""A whole run: engine, server, trainer and agents as processes, until the trainer has made its steps."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from ops.engine.process import PYTHON, EngineProcess, environment, kept_model, run_module
from ops.server import ROOT, OwnProcess, ServerProcess
from ops.train.agents import AGENTS
from ops.train.rollouts import MAX_STALENESS

READY_S = 120.0
"""For the server to learn of the engine that it takes token ids."""

POLL_S = 0.2


class RunFailed(Exception):
    """A process ended too early. The message is the end of its log."""


class Program(OwnProcess):
    """A process that serves no HTTP."""

    def answers(self) -> bool:
        return self.poll() is None


def policy() -> Path:
    """The folder of the model that a run begins with; the first call makes it."""
    package = ROOT / "ops" / "train"

    def make(folder: Path) -> None:
        run_module("ops.train.model", str(folder / "model"))

    return kept_model([package / "model.py", package / "task.py"], make)


def run(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """Runs it in an empty folder, and returns what `run.json` there has. Raises RunFailed."""
    model, weights = policy(), folder / "weights"
    weights.mkdir(parents=True)
    shutil.copytree(model, weights / "0")
    (weights / "newest").symlink_to("0")
    begun = time.time()
    processes = _processes(folder, seed, steps, model)
    engine, trainer = processes["engine"], processes["trainer"]
    try:
        server = processes["server"]
        assert isinstance(server, ServerProcess)
        server.migrate()
        engine.start()
        server.start()
        _wait_for_ids(server.base_url)
        for process in processes.values():
            if process not in (engine, server):
                process.launch()
        while (ended := trainer.poll()) is None:
            for process in processes.values():
                if process is not trainer and process.poll() is not None:
                    raise RunFailed(process.log_path.read_text()[-4000:])
            time.sleep(POLL_S)
        if ended:
            raise RunFailed(trainer.log_path.read_text()[-4000:])
    finally:
        for process in reversed(processes.values()):
            process.kill() if isinstance(process, Program) else process.stop()
    outcome = {
        "seed": seed,
        "steps": steps,
        "began": begun,
        "server": "turnlog",
        "max_staleness": MAX_STALENESS,
    }
    outcome |= {**_figures(folder), "seconds": time.time() - begun, "complete": True}
    (folder / "run.json").write_text(json.dumps(outcome, indent=1) + "\n")
    return outcome


def _processes(folder: Path, seed: int, steps: int, model: Path) -> dict[str, OwnProcess]:
    """By name, none of them started."""
    newest, seeded = folder / "weights" / "newest", ("--seed", str(seed))
    engine = EngineProcess(
        newest, folder, "--tokenizer", str(model), *seeded, "--max-model-len", "1024"
    )
    server = ServerProcess(
        folder, upstreams=[engine.base_url], environment={"TURNLOG_TOKENIZER": str(model)}
    )
    given = ("--url", server.base_url, "--folder", str(folder))
    trainer = [
        str(PYTHON),
        "-m",
        "ops.train.trainer",
        *given,
        "--engine",
        engine.base_url,
        "--steps",
        str(steps),
    ]
    processes: dict[str, OwnProcess] = {
        "engine": engine,
        "server": server,
        "trainer": Program(trainer, folder / "trainer.log", environment=environment()),
    }
    for number in range(AGENTS):
        agent = [sys.executable, "-m", "ops.train.agents", *given, *seeded, "--agent", str(number)]
        name = f"agent-{number}"
        processes[name] = Program(agent, folder / f"{name}.log", environment=server.environment)
    return processes


def _wait_for_ids(url: str) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        engines = httpx.get(f"{url}/engines").json()["engines"]
        if all(engine["token_ids"] for engine in engines):
            return
        if time.monotonic() > deadline:
            raise RunFailed(f"the engine takes no token ids: {engines}")
        time.sleep(POLL_S)


def read_steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def _figures(folder: Path) -> dict[str, Any]:
    steps = read_steps(folder)
    tokens, seconds = sum(step["tokens"] for step in steps), sum(step["seconds"] for step in steps)
    last = steps[-5:]
    return {
        "reward_first": steps[0]["reward"],
        "reward_last_5": statistics.fmean(step["reward"] for step in last),
        "ratio_error_first": steps[0]["ratio_error"],
        "ratio_error_max": max(step["ratio_error"] for step in steps),
        "staleness_mean": statistics.fmean(step["staleness"] for step in steps),
        "staleness_max": max(step["staleness"] for step in steps),
        "tokens": tokens,
        "tokens_a_second": tokens / seconds,
    }
