"""verl's own workers, queue, replay buffer and advantages over rollouts of `turnlog.integrations.verl`, on the CPU.

Of verl only its inference servers are missing, which need a GPU: an actor holds their version of the weights, and the
address that verl's load balancer has is that of an engine whose generations are known.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from trainers.stand import Generation, Sequenced, TrainerStand, judge, trainer_stand

from turnlog import Turnlog

os.environ.setdefault("TQ_NUM_THREADS", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    missing = "see 'Trainers' packages' in CONTRIBUTING.md"
    torch = pytest.importorskip("torch", reason=missing)
    ray = pytest.importorskip("ray", reason=missing)
    tq = pytest.importorskip("transfer_queue", reason=missing)
    v1 = pytest.importorskip("verl.trainer.ppo.v1", reason=missing, exc_type=ImportError)
    import hydra
    import verl
    from omegaconf import OmegaConf, open_dict
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from verl import DataProto
    from verl.experimental.agent_loop import AgentLoopManager
    from verl.utils import tensordict_utils as tu
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    from ops.simulator import tokenizer_files
    from turnlog.integrations import verl as adapter

pytestmark = [pytest.mark.harness, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

RUN = "of-verl"
LENGTH = {"prompt_length": 16, "response_length": 160}
"""The prompt is longer than that."""


async def agent(*, base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> Any:
    """Two turns, and what `extra_info` says: a row of its own for the second, or an end that is none."""
    told = metadata["extra_info"]
    if told.get("does") == "nothing":
        raise OSError("no sandbox")
    messages, reply = list(prompt), None
    async with openai.AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key=metadata["api_key"], max_retries=20, timeout=60
    ) as client:
        for turn in range(2):
            if turn == 1 and told.get("does") == "compacts":
                messages = [{"role": "user", "content": "In short: go on with the sum."}]
            if turn == 1 and told.get("does") == "raises":
                raise RuntimeError("the tool broke")
            if turn == 1 and told.get("waits"):
                Path(told["waits"], metadata["session_id"]).touch()
                while not Path(told["waits"], "go").exists():
                    await asyncio.sleep(0.02)
            reply = await client.chat.completions.create(
                model=metadata.get("model", "simulator"), messages=messages, **{**request_kwargs, "max_tokens": 24}
            )
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And?"}]
    return float(len(messages[-2]["content"] or "") % 5)


class Server:
    """In the place of verl's `vLLMHttpServer`."""

    def __init__(self) -> None:
        self.global_steps = 3


class World:
    """A server and an engine, and of verl the configuration, a load balancer with a server's address, and its client."""

    def __init__(self, stand: TrainerStand, folder: Path) -> None:
        self.stand, self.folder = stand, folder
        tokenizer_files.write(folder / "model")
        small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300}
        Qwen2ForCausalLM(Qwen2Config(**small, **heads)).save_pretrained(folder / "model")
        self.server = ray.remote(Server).remote()
        self.address = stand.engine.base_url.removeprefix("http://")
        self.balancer = get_router_handle({self.address: self.server})

    def config(self, *overrides: str) -> Any:
        with hydra.initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
            return hydra.compose(
                "ppo_trainer",
                [
                    f"actor_rollout_ref.model.path={self.folder / 'model'}",
                    "actor_rollout_ref.rollout.name=vllm",
                    "actor_rollout_ref.rollout.n=2",
                    "actor_rollout_ref.rollout.agent.num_workers=2",
                    "actor_rollout_ref.rollout.agent.default_agent_loop=turnlog",
                    f"actor_rollout_ref.rollout.agent.agent_loop_config_path={adapter.__file__.removesuffix('py')}yaml",
                    "+turnlog.agent=trainers.test_verl:agent",
                    *(f"actor_rollout_ref.rollout.{name}={value}" for name, value in LENGTH.items()),
                    *overrides,
                ],
            )
    
    def client(self, config: Any) -> Any:
        return LLMServerClient(config, load_balancer_handle=self.balancer)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("verl")
    with trainer_stand(folder, "--seed", "5", dialect="vllm") as stand:
        variables = {"TURNLOG_URL": stand.url, "TURNLOG_RUN": RUN}
        environment = {"env_vars": {**variables, "TQ_NUM_THREADS": "1"}}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            ray.init(
                num_cpus=8, include_dashboard=False, object_store_memory=100_000_000, runtime_env=environment
            )
            yield World(stand, folder)
            ray.shutdown()


def test_classic(world):
    config = world.config()
    manager = AgentLoopManager.create(config=config, llm_client=world.client(config))
    plays = [{"does": "answers"}, {"does": "compacts"}]
    n = 2
    batch = DataProto.from_single_dict({
        "raw_prompt": np.array([[{"role": "user", "content": f"What is 6 times {i}?"}] for i in range(2) for _ in range(n)], dtype=object),
        "uid": np.array([f"u{i}" for i in range(2) for _ in range(n)], dtype=object),
        "extra_info": np.array([plays[i] for i in range(2) for _ in range(n)], dtype=object),
    })
    out = manager.generate_sequences(batch)
    print(out)
