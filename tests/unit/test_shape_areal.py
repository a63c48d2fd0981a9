"""AReaL's rows: batches of one, and AReaL's own padding on them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from shape_rows import TWO_TURNS, Given, lists, rows

from app.export.shapes import areal

TENSORS = ("input_ids", "loss_mask", "logprobs", "versions", "attention_mask", "rewards")


def test_versions_that_are_no_numbers_are_indices_into_names() -> None:
    turns = [Given([1], [2], [-1.0], version="default"), Given([3], [4], [-1.0], version="lora-b")]
    found = lists(areal.fields(rows(turns)[0]))
    assert found["versions"] == [[-1, 0, -1, 1]]
    assert found["weight_version_names"] == ["default", "lora-b"]


def test_areal_joins_rows_to_a_batch() -> None:
    """`concat_padded_tensors` is what AReaL's workflows do with the trajectories of a group."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = pytest.importorskip("areal.utils.data", reason="areal is not installed, see CONTRIBUTING.md")
    long, short = rows(TWO_TURNS)[0], rows([Given([1], [7], [-3.0])], reward=0.0)[0]
    batch = data.concat_padded_tensors(
        [{name: torch.from_numpy(np.array(areal.fields(row)[name])) for name in TENSORS} for row in (long, short)]
    )
    assert batch["input_ids"].shape == (2, 5)
    assert batch["attention_mask"].tolist() == [[True] * 5, [True, True, False, False, False]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 0, 1], [0, 1, 0, 0, 0]]
    assert batch["logprobs"][1].tolist() == [0.0, -3.0, 0.0, 0.0, 0.0]
    assert batch["rewards"].tolist() == [1.0, 0.0]
