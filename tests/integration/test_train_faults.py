"""The kills of a run of `ops.train`: by its schedule, of every process, and each is started again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ops.server import OwnProcess, ServerProcess
from ops.simulator.process import SimulatorProcess
from ops.train.faults import ENGINE, SERVER, TRAINER, ProcessEnded, Program, Schedule, Supervisor, generated
from ops.train.rollouts import lines

FAST = Schedule(seed=1, every_s={SERVER: 1.0, ENGINE: 1.5, "agent": 0.5}, trainer_at=0.5)
TRAINER_CODE = """
import pathlib, time
folder = pathlib.Path()
if (folder / "steps.jsonl").exists():
    (folder / "restored").touch()
else:
    (folder / "steps.jsonl").write_text("{}\\n{}\\n")
def kills():
    path = folder / "kills.jsonl"
    return path.read_text() if path.exists() else ""
wanted = [f'"{name}", "what": "started"' for name in ("server", "engine", "agent-0", "agent-1", "trainer")]
while not all(part in kills() for part in wanted):
    time.sleep(0.05)
"""
"""A trainer of nothing, that ends when each process has been started again."""


def program(folder: Path, name: str, code: str) -> Program:
    return Program([sys.executable, "-c", code], folder / f"{name}.log", port=1, environment=os.environ, root=folder)


def test_every_process_dies_and_is_started_again(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    (weights / "7").mkdir(parents=True)
    (weights / "newest").symlink_to("7")
    with SimulatorProcess() as engine, ServerProcess(tmp_path, upstreams=[engine.base_url]) as server:
        forever = "import time; time.sleep(1000)"
        agents = {name: program(tmp_path, name, forever) for name in ("agent-0", "agent-1")}
        trainer = program(tmp_path, "trainer", TRAINER_CODE)
        processes: dict[str, OwnProcess] = {SERVER: server, ENGINE: engine, TRAINER: trainer, **agents}
        for process in (trainer, *agents.values()):
            process.launch()
        try:
            Supervisor(tmp_path, processes, 4, FAST).run()
        finally:
            for process in agents.values():
                process.kill()
    told = lines(tmp_path / "kills.jsonl")
    killed = [line["name"] for line in told if line["what"] == "killed"]
    assert killed.count(TRAINER) == 1
    assert set(killed) == set(processes)
    at = {(line["name"], line["what"]): line["at"] for line in told}
    for agent in agents:
        # Agents that saw undone sessions end before the restore, and begin after it.
        assert at[agent, "started"] > at[TRAINER, "killed"]
    assert {line["version"] for line in told if line["name"] == ENGINE} == {"7"}


def test_a_process_that_ends_by_itself_ends_the_run(tmp_path: Path) -> None:
    processes: dict[str, OwnProcess] = {
        ENGINE: program(tmp_path, ENGINE, "import time; time.sleep(1000)"),
        TRAINER: program(tmp_path, TRAINER, "raise SystemExit(3)"),
    }
    for process in processes.values():
        process.launch()
    with pytest.raises(ProcessEnded, match="trainer ended with 3"):
        Supervisor(tmp_path, processes, 4, None).run()
    processes[ENGINE].kill()
    assert not (tmp_path / "kills.jsonl").exists()


def test_the_engines_counter_is_summed_over_its_lines() -> None:
    lines_of_engine = [
        "# TYPE vllm:generation_tokens_total counter",
        'vllm:generation_tokens_total{engine="0",model_name="tiny"} 12.0',
        'vllm:generation_tokens_total{engine="1",model_name="tiny"} 1e+02',
        'vllm:generation_tokens_created{engine="0"} 5.0',
    ]
    assert generated("\n".join(lines_of_engine)) == 112
    assert json.dumps(generated("")) == "0"
