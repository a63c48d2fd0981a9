"""SkyRL's fully asynchronous trainer with Turnlog's experiment, on a machine without a GPU; and words of its command.

A step is simulated, as SkyRL's own trainer for that does: all else of its loop, its batches and its pauses is real.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim

from turnlog.integrations import skyrl
from turnlog.integrations.skyrl import TurnlogExp, told_versions

TENSORS = ("sequences", "attention_mask", "response_mask", "loss_mask", "rollout_logprobs", "rewards")


def words(folder: Path, url: str, *more: str) -> list[str]:
    """Of a trainer whose engine, tokenizer and data set are those of a test."""
    return [
        "trainer.logger=console",
        f"trainer.policy.model.path={folder / 'tokenizer'}",
        *(f"trainer.{name}_path={folder / name}" for name in ("export", "ckpt", "log")),
        f"data.train_data=[{folder / 'train.jsonl'}]",
        "data.val_data=[]",
        "data.dataloader.num_workers=0",
        "trainer.placement.colocate_all=false",
        "trainer.placement.policy_num_gpus_per_node=1",
        *(f"trainer.{name}=-1" for name in ("eval_interval", "ckpt_interval", "hf_save_interval")),
        *(f"trainer.{name}=2" for name in ("train_batch_size", "policy_mini_batch_size")),
        *(f"trainer.micro_{name}_batch_size_per_gpu=1" for name in ("train", "forward")),
        "trainer.resume_mode=none",
        "trainer.epochs=1",
        "trainer.algorithm.use_kl_loss=false",
        "generator.n_samples_per_prompt=2",
        "generator.sampling_params.max_generate_length=24",
        "trainer.enable_ray_gpu_monitor=false",
        "generator.inference_engine.enable_ray_prometheus_stats=false",
        "generator.inference_engine.run_engines_locally=false",
        f"generator.inference_engine.external_proxy_url={url}",
        f"generator.inference_engine.external_server_urls=[{url}]",
        *more,
    ]


FULLY_ASYNC = (
    "trainer.algorithm.policy_loss_type=rollout_is",
    *(f"trainer.fully_async.{word}=true" for word in ("enabled", "simulate_training")),
    "trainer.fully_async.simulate_training_step_seconds=0",
    "trainer.fully_async.num_parallel_generation_workers=4",
    "trainer.fully_async.max_staleness_steps=1",
)


class Trainer(FullyAsyncTrainerSim):  # type: ignore[misc]
    """Writes the batches of its steps into the folder `BATCHES`."""

    def init_weight_sync_state(self) -> None:
        super().init_weight_sync_state()
        self.dispatch.get_timing_metrics = dict  # The trainer asks for both, and SkyRL 0.4.0's stand-in lacks them.
        self.dispatch.finalize_pending_saves = id

    async def _run_training(self, training_input: Any) -> Any:
        tensors = {name: training_input[name] for name in TENSORS}
        torch.save(tensors, Path(os.environ["BATCHES"], f"{self.global_step}.pt"))
        return await super()._run_training(training_input)


class Experiment(TurnlogExp):
    def get_trainer(self, **given: Any) -> Any:
        return told_versions(Trainer(**given), self.cfg.turnlog)


def main() -> None:
    skyrl.main(Experiment)
