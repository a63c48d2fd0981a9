"""Trains a tiny Llama of the simulator's vocabulary with TRL's own trainers; its agents, and what the trainers got.

As a program it is a trainer that a test kills: `python -m trainers.trl_training FOLDER`, with `TURNLOG_URL`,
`TURNLOG_RUN`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import openai
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

from turnlog.integrations.trl import TurnlogRollouts, TurnlogRolloutWorker, TurnlogWeightTransfer, turnlog_reward

TASKS = ("What is 6 times 7?", "Name a colour", "Say a word", "Count to three", "Sing")

AGENT, LINEAR = "trainers.trl_training:agent", "trainers.trl_training:linear"

PLAYED = "TURNLOG_TEST_PLAYED"
"""The file in which agents write what they did."""


async def agent(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> float:
    """Two turns; attempt 1 begins its second from nothing, attempt 2 raises between them."""
    attempt = metadata["attempt"]
    if attempt is None:  # OpenEnv's sessions have none.
        attempt = int(metadata["session_id"].partition(".")[0][-1], 16) % 4
    messages = list(prompt)
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=metadata["api_key"], max_retries=20) as client:
        for follow_up in ("Are you sure?", None):
            reply = await client.chat.completions.create(
                model="simulator", messages=messages, extra_body=request_kwargs
            )
            if attempt == 2:
                tell(metadata, None)
                raise ValueError("this attempt always fails")
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            if follow_up:
                messages.append({"role": "user", "content": follow_up})
            if attempt == 1 and not metadata.get("linear"):
                messages = [{"role": "user", "content": "Anew: " + metadata.get("hint", "")}]
    reward = float(len(messages[-1]["content"]) % 7 + attempt)
    tell(metadata, reward)
    return reward


async def linear(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> float:
    return await agent(base_url, prompt, request_kwargs, {**metadata, "linear": True})


async def broken(**asked: Any) -> None:
    raise ValueError("no agent")


def tell(metadata: dict[str, Any], reward: float | None) -> None:
    said = {"session_id": metadata["session_id"], "group_id": metadata["group_id"], "reward": reward}
    with open(os.environ[PLAYED], "a") as file:
        file.write(json.dumps(said) + "\n")


def dataset() -> Dataset:
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": task}], "hint": f"hint {place}"} for place, task in enumerate(TASKS)]
    )


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"t{number}": number for number in range(2048)}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call, unused-ignore]
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")), pad_token="t0", eos_token="t1"
    )


def model() -> LlamaForCausalLM:
    sizes: Any = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=2048, max_position_embeddings=1024, **sizes))


COMMON = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_steps": 2,
    "learning_rate": 0.1,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "max_completion_length": 24,
}


class Taken:
    """A rollouts' queue that keeps what the trainer took."""

    def __init__(self, queue: Any) -> None:
        self.samples: list[Any] = []
        self._queue = queue

    def get(self, timeout: float) -> Any:
        self.samples.append(self._queue.get(timeout=timeout))
        return self.samples[-1]

    def qsize(self) -> int:
        return int(self._queue.qsize())


class RecordingAsyncTrainer(AsyncGRPOTrainer):  # type: ignore[misc]
    """Keeps what its losses are computed of: each old logprob with its advantage."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        selected = inputs["token_index"] >= 0
        terms = zip(inputs["old_log_probs"][selected].tolist(), inputs["advantages"][selected].tolist(), strict=True)
        self.__dict__.setdefault("terms", []).append(list(terms))
        return super().compute_loss(model, inputs, *arguments, **named)


class RecordingTrainer(GRPOTrainer):  # type: ignore[misc]
    """Keeps the batches that it makes of rollouts."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        self.__dict__.setdefault("batches", []).append((made, inputs))
        return made


def attend(query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, *longest: int, **named: Any) -> Any:
    """What TRL's kernel for GPUs computes, segment by segment."""
    out = torch.empty_like(query)
    bounds = zip(*(starts.tolist() for starts in (starts_q, starts_q[1:], starts_k, starts_k[1:])), strict=False)
    for q, q_end, k, k_end in bounds:
        seen = torch.ones(q_end - q, k_end - k, dtype=torch.bool).tril(k_end - k - (q_end - q))
        parts = (query[q:q_end], key[k:k_end], value[k:k_end])
        found = torch.nn.functional.scaled_dot_product_attention(
            *(part.transpose(0, 1) for part in parts), attn_mask=seen, scale=named["softmax_scale"]
        )
        out[q:q_end] = found.transpose(0, 1)
    return out


def async_trainer(folder: Path, worker: Any = None, agent: str = AGENT, **settings: Any) -> Any:
    """One on the CPU: only its attention kernel is another, and no speed of a GPU is looked up."""
    async_grpo_trainer.get_peak_flops_per_device = lambda *arguments: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
    saved = folder / "model"
    if not saved.exists():
        model().save_pretrained(saved)
    args = AsyncGRPOConfig(output_dir=str(folder / "out"), token_budget=0, **{**COMMON, **settings})
    worker = worker(args) if worker else TurnlogRolloutWorker(agent, dataset(), args)
    made = RecordingAsyncTrainer(
        str(saved),
        args=args,
        train_dataset=dataset(),
        processing_class=tokenizer(),
        rollout_worker=worker,
        weight_transfer=TurnlogWeightTransfer(worker),
    )
    made.rollout_queue = Taken(made.rollout_queue)
    return made


def trainer(
    folder: Path,
    agent: str | None = "trainers.trl_training:linear",
    command: Any = None,
    session: Any = None,
    **settings: Any,
) -> Any:
    return RecordingTrainer(
        model=model(),
        args=GRPOConfig(output_dir=str(folder / "out"), **{**COMMON, **settings}),
        reward_funcs=turnlog_reward,
        train_dataset=dataset(),
        processing_class=tokenizer(),
        rollout_func=TurnlogRollouts(agent, command=command, **(session or {})),
    )


def main(kind: str, folder: Path, steps: str) -> None:
    make = async_trainer if kind == "async" else trainer
    made = make(folder, max_steps=int(steps), save_strategy="steps", save_steps=1)
    checkpoints = sorted((folder / "out").glob("checkpoint-*"))
    made.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
