"""xtuner's own sampler, strategy, replay buffer and data for training (b934f46), with rollouts on Turnlog.

The controller of its engines is a stand-in: nothing is asked of it. Of the trainer only the method that makes its data
is called.
"""

# ruff: noqa: E402

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import torch

for operator in ("nms", "qnms"):  # xtuner imports torchvision, whose wheel has no operators for a torch without CUDA.
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from xtuner.v1.data_proto.rl_data import SampleParams, Status
from xtuner.v1.datasets.config import DataloaderConfig, DatasetConfig
from xtuner.v1.datasets.rl_tokenize_fn import RLTextTokenizeFnConfig
from xtuner.v1.rl.advantage import GRPOAdvantageConfig
from xtuner.v1.rl.agent_loop_manager import AgentLoopManagerConfig, SamplerConfig, SyncProduceStrategyConfig
from xtuner.v1.rl.replay_buffer import SyncReplayBufferConfig
from xtuner.v1.train.rl_trainer import BaseRLTrainer

from ops.simulator import tokenizer_files
from turnlog.integrations.xtuner import TurnlogAgentLoopConfig


class Controller:
    """Of xtuner's engines: does nothing, whatever it is told."""

    def __getattr__(self, name: str) -> Any:
        return self

    async def remote(self, *given: Any, **named: Any) -> None: ...


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """A batch of groups as they come from the replay buffer, and as they go to the training."""
    folder = Path("xtuner")
    tokenizer_files.write(folder)
    rows = [
        {
            "data_source": "unit",
            "prompt": row["messages"],
            "reward_model": {"style": "rule"},
            "extra_info": {"what": row["what"]},
        }
        for row in asked["rows"]
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = DatasetConfig(
        name="unit", anno_path=folder / "rows.jsonl", enable_sequential_sampler=True, disable_filter=True
    )
    loading = DataloaderConfig(
        dataset_config_list=[{"dataset": dataset, "tokenize_fn": RLTextTokenizeFnConfig(max_length=512)}],
        collator="fake_collator",
        pack_level="none",
        pack_to_max_length=False,
        pack_max_length=1024,
        num_workers=0,
        round_up=False,
    )
    loop = TurnlogAgentLoopConfig(
        hf_checkpoint=str(folder), sample_params=SampleParams(max_tokens=40, temperature=0.9), **asked["config"]
    )
    manager = AgentLoopManagerConfig(
        tasks=[
            {
                "task_name": "unit",
                "agent_loop_config": loop,
                "produce_strategy_config": SyncProduceStrategyConfig(),
                "sampler_config": SamplerConfig(dataloader_cfg=loading, prompt_repeat_k=asked["group_size"]),
            }
        ],
    ).build(
        rollout_controller=Controller(),
        tokenizer=str(folder),
        replay_buffer=SyncReplayBufferConfig().build(),
    )
    batch = asyncio.run(manager.produce_batch(batch_size=asked["batch_size"], train_step=1, model_step=0))
    groups = batch.rollout_states
    if asked["again"]:
        expired = [state.model_copy(update={"status": Status.EXPIRED}, deep=True) for state in groups[0]]
        groups = [*groups, asyncio.run(loop.build_local(None).generate_group(expired))]
    trainer = BaseRLTrainer.__new__(BaseRLTrainer)
    trainer._advantage_estimator = GRPOAdvantageConfig().build()
    trainer.logger = logging.getLogger("xtuner")
    data, _ = trainer._prepare_train_data(groups, pack_max_length=4096)
    return {
        "groups": [[_told(state) for state in group] for group in groups],
        "failed": batch.failed_samples,
        "data": [
            {
                "input_ids": one["seq_ctx"].input_ids.flatten().tolist(),
                "shifted_labels": one["shifted_labels"].flatten().tolist(),
                "logprobs": one["rollout_logprobs"].flatten().tolist(),
                "advantage": one["advantage"],
            }
            for one in data
        ],
    }


def _told(state: Any) -> dict[str, Any]:
    names = ("group_id", "rollout_id", "reward", "response", "response_ids", "response_model_steps", "seq_staleness")
    return {name: getattr(state, name) for name in names} | {"status": state.status.value}
