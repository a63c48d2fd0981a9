"""TRL's rows: what they hold, and TRL's own trainer and packing on them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from shape_rows import TWO_TURNS, lists, rows

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
