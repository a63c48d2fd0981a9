"""A whole run: engine, server, trainer and agents as processes, until the trainer has made its steps."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from ops.bench.peers.protocol import Place, interpreter
from ops.bench.peers.servers import Gateway
from ops.engine.process import PYTHON, EngineProcess, environment, kept_model, run_module
from ops.server import ROOT, VERBATIM, OwnProcess, ServerProcess
from ops.train.agents import AGENTS
from ops.train.faults import Program, Schedule, Supervisor
from ops.train.rollouts import MAX_STALENESS, lines


def policy() -> Path:
    """The folder of the model that a run begins with; the first call makes it."""
    package = ROOT / "ops" / "train"

    def make(folder: Path) -> None:
        run_module("ops.train.model", str(folder / "model"))

    return kept_model([package / "model.py", package / "task.py"], make)


def run(
    folder: Path, seed: int, steps: int, schedule: Schedule | None = None, *, in_memory: bool = False
) -> dict[str, Any]:
    """Run it in an empty folder, and return what `run.json` there has. Raises ProcessEnded.

    `in_memory`: the peer of `peer.py` stands in Turnlog's place.
    """
    # A copy of its own: what starts again reads the tokenizer once more.
    model = Path(shutil.copytree(policy(), folder / "model"))
    weights = folder / "weights"
    weights.mkdir()
    shutil.copytree(model, weights / "0")
    (weights / "newest").symlink_to("0")
    processes = _processes(folder, seed, steps, model, in_memory)
    engine, server = processes["engine"], processes["server"]
    try:
        engine.start()
        if isinstance(server, ServerProcess):
            server.migrate()
        server.start()
        begun = time.time()
        for process in processes.values():
            if isinstance(process, Program):
                process.launch()
        Supervisor(folder, processes, steps, schedule, restores=not in_memory).run()
    finally:
        for process in reversed(processes.values()):
            process.kill() if isinstance(process, Program) else process.stop()
    outcome = {
        "seed": seed,
        "steps": steps,
        "began": begun,
        "server": "memory" if in_memory else "turnlog",
        "max_staleness": MAX_STALENESS,
    }
    outcome |= {**_figures(folder), "seconds": time.time() - begun}
    (folder / "run.json").write_text(json.dumps(outcome, indent=1) + "\n")
    return outcome


def _processes(folder: Path, seed: int, steps: int, model: Path, in_memory: bool) -> dict[str, OwnProcess]:
    """By name, none of them started."""
    newest, seeded = folder / "weights" / "newest", ("--seed", str(seed))
    engine = EngineProcess(newest, folder, "--tokenizer", str(model), *seeded, "--max-model-len", "1024")
    server = (
        gateway(folder, engine.base_url)
        if in_memory
        else ServerProcess(
            folder, upstreams=[engine.base_url], environment={**VERBATIM, "TURNLOG_TOKENIZER": str(model)}
        )
    )
    given = ["--url", server.base_url, "--folder", str(folder)]
    given += ["--in-memory"] if in_memory else []
    trainer = [str(PYTHON), "-m", "ops.train.trainer", *given, "--engine", engine.base_url]
    trainer += ["--steps", str(steps)]
    processes: dict[str, OwnProcess] = {
        "engine": engine,
        "server": server,
        "trainer": Program(trainer, folder / "trainer.log", environment=environment()),
    }
    for number in range(AGENTS):
        agent = [sys.executable, "-m", "ops.train.agents", *given, *seeded, "--agent", str(number)]
        name = f"agent-{number}"
        processes[name] = Program(agent, folder / f"{name}.log", environment=os.environ)
    return processes


def gateway(folder: Path, engine_url: str) -> OwnProcess:
    """The peer, not started; it is installed at the first use. Raises NotInstalled."""
    server = Gateway("memory", "memory", sync_traces=True)
    place = Place(folder, engine_url, interpreter(server), None, contextlib.ExitStack(), [])
    return server.process(place)


def _figures(folder: Path) -> dict[str, Any]:
    steps = lines(folder / "steps.jsonl")
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
