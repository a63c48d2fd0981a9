"""rLLM's own gateway manager and engine for agents (9beb6e0), pointed at Turnlog by configuration, and verl's batch.

Of verl's engine only the addresses of its servers are asked, so a class of its name stands in for it.
"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import OmegaConf
from rllm.engine.agentflow_engine import AgentFlowEngine
from rllm.eval.types import EvalOutput
from rllm.gateway.manager import GatewayManager
from rllm.trainer.verl.dataclass import AccumulatedData
from rllm.trainer.verl.transform import _process_trajectory
from rllm.types import Trajectory

from trainers import playing


class VerlEngine:
    def __init__(self, address: str) -> None:
        self.server_addresses = [address]


class Flow:
    """rLLM's `AgentFlow`: the tests' agent, at the address that the gateway has for the session."""

    async def arun(self, task: Any, config: Any) -> Trajectory:
        name = config.session_uid.replace("/", "-")
        known = {**task.metadata, "session_id": name, "api_key": "EMPTY", "attempt": int(name.rpartition(":")[2])}
        await playing.run(config.base_url.removesuffix("/v1"), task.metadata["messages"], {}, known)
        return Trajectory(name="agent")


class Evaluator:
    def evaluate(self, task: Any, episode: Any) -> EvalOutput:
        [trajectory] = episode.trajectories
        return EvalOutput(reward=float(len(trajectory.steps[-1].model_output.completion_ids)), is_correct=True)


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Of each episode its reward, and the rows that rLLM makes of it for verl."""
    package = Path(importlib.util.find_spec("rllm").origin).parent  # type: ignore[union-attr, arg-type]
    turnlog = urlsplit(asked["turnlog"])
    defaults = OmegaConf.load(package / "trainer/config/rllm/base.yaml")
    config = OmegaConf.create({"rllm": defaults, "model": {"name": "simulator"}})
    config.rllm.gateway.host, config.rllm.gateway.port = turnlog.hostname, turnlog.port
    sampling = {"temperature": 0.9, "top_p": 1.0, "max_tokens": 40}
    gateway = GatewayManager(config, mode="process")  # As rLLM's trainer makes it for verl.
    gateway.start(VerlEngine(asked["engine"]))
    gateway.set_weight_version(asked["version"])
    engine = AgentFlowEngine(
        Flow(),
        Evaluator(),
        gateway,
        model="simulator",
        retry_limit=2,
        raise_on_error=False,
        train_sampling_params=sampling,
    )
    tasks = [{**row, "question": row["messages"][0]["content"]} for row in asked["rows"] for _ in range(2)]
    task_ids = [f"task/{place}" for place in range(len(asked["rows"])) for _ in range(2)]
    episodes = asyncio.run(engine.execute_tasks(tasks, task_ids))
    workers = [worker.url for worker in gateway.client.list_workers()]
    gateway.stop()
    found = []
    for episode in episodes:
        rows = AccumulatedData()
        for trajectory in episode.trajectories:
            _process_trajectory(trajectory, episode.id, rows)
        found.append(
            {
                "rewards": [trajectory.reward for trajectory in episode.trajectories],
                "versions": [step.weight_version for one in episode.trajectories for step in one.steps],
                "prompts": [one.tolist() for one in rows.prompts],
                "responses": [one.tolist() for one in rows.responses],
                "masks": [one.tolist() for one in rows.traj_mask],
                "logprobs": [one.tolist() for one in rows.rollout_logprobs],
            }
        )
    return {"episodes": found, "workers": workers}
