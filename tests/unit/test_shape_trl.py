"""TRL's rows: what they hold, and TRL's own trainer and packing on them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shape_rows import TWO_TURNS, Given, lists, rows

from app.export.shapes import trl

ABSENT = "trl is not installed: pip install torch==2.13.0 trl==1.16.0"


def test_trl_packs_each_sampled_token_with_its_logprob() -> None:
    """`TreeRow` is what TRL's asynchronous GRPO makes of `RolloutSample`s: it picks the loss terms itself."""
    for package in ("torch", "datasets", "trl"):
        pytest.importorskip(package, reason=ABSENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
        from trl.experimental.async_grpo.packing import TreeRow
    found = lists(trl.fields(rows(TWO_TURNS, advantage=0.25)[0]))
    prompt = len(found["prompt_ids"])
    sample = RolloutSample(
        prompt=[],
        completion=[],
        input_ids=np.array(found["prompt_ids"] + found["completion_ids"], np.int64),
        completion_mask=np.array([0] * prompt + found["env_mask"], np.int64),
        old_log_probs=np.array([0.0] * prompt + found["logprobs"], np.float32),
        advantage=found["advantage"],
        model_version=3,
        group_id=0,
        metrics={},
    )
    tree = TreeRow()
    names = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id")
    tree.add({name: getattr(sample, name) for name in names})
    packed = tree.pack()
    assert packed["input_ids"].tolist() == [1, 2, 3, 5, 6]
    assert packed["shift_labels"].tolist() == [-100, 3, -100, 6, -100]
    assert packed["token_index"].tolist() == [1, 3]
    assert packed["old_log_probs"].tolist() == [-0.5, -0.125]
    assert packed["advantages"].tolist() == [0.25, 0.25]


@pytest.mark.filterwarnings("ignore")
def test_trl_trains_a_step_on_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real `GRPOTrainer` on a tiny model has our ids and mask, and its reward function our reward."""
    for package in ("torch", "datasets", "trl"):
        pytest.importorskip(package, reason=ABSENT)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    group = [
        lists(trl.fields(rows(TWO_TURNS, session_id="a", reward=1.0)[0])),
        lists(trl.fields(rows([Given([1, 2], [7, 8], [-1.0, -2.0])], session_id="b", reward=0.0)[0])),
    ]
    batches, rewarded = _train(group, tmp_path)
    assert rewarded == [1.0, 0.0]
    (batch,) = batches
    assert batch["prompt_ids"].tolist() == [[1, 2], [1, 2]]
    assert batch["completion_ids"].tolist() == [[3, 5, 6], [7, 8, 0]]
    assert batch["completion_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["tool_mask"].tolist() == [[1, 0, 1], [1, 1, 1]]
    assert batch["advantages"].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)


def _train(group: list[dict[str, Any]], folder: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """One optimiser step on a group of two; the batches that the trainer made, and the rewards that it was given."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    batches: list[dict[str, Any]] = []
    rewarded: list[float] = []

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        return {name: [row[name] for row in group] for name in group[0]}

    def score(completions: list[Any], reward: list[float], **columns: Any) -> list[float]:
        assert columns["session_id"] == ["a", "b"]
        rewarded.extend(reward)
        return reward

    class Watched(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            made = super()._generate_and_score_completions(inputs)
            batches.append(made)
            return made

    words = {f"t{index}": index for index in range(10)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")), pad_token="t0", eos_token="t9"
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_positions=16, n_embd=8, n_layer=1, n_head=1))
    before = model.transformer.wte.weight.detach().clone()
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_generations=2,
        max_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1.0,
    )
    trainer = Watched(
        model=model,
        args=config,
        reward_funcs=score,
        train_dataset=Dataset.from_list([{"prompt": "t1 t2"}]),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.train()
    assert not bool((before == model.transformer.wte.weight.detach()).all())
    return batches, rewarded
