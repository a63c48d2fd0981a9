"""AReaL's rows: batches of one, and AReaL's own padding on them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from shape_rows import TWO_TURNS, Given, conversations, expected, lists, rows

from app.export.row import Unfit
from app.export.shapes import areal

TENSORS = ("input_ids", "loss_mask", "logprobs", "versions", "attention_mask", "rewards")


def test_two_turns() -> None:
    (row,) = rows(TWO_TURNS, reward=0.5)
    fields = areal.fields(row)
    found = lists(fields)
    assert found["input_ids"] == [[1, 2, 3, 5, 6]]
    assert found["loss_mask"] == [[0, 0, 1, 0, 1]]
    assert found["logprobs"] == [[0.0, 0.0, -0.5, 0.0, -0.125]]
    assert found["versions"] == [[-1, -1, 3, -1, 4]]
    assert found["attention_mask"] == [[True] * 5]
    assert found["rewards"] == [0.5]
    assert found["weight_version_names"] == []
    assert set(found) == set(areal.COLUMNS)
    arrays = [fields[name] for name in TENSORS]
    assert [array.dtype.name for array in arrays if isinstance(array, np.ndarray)] == [
        "int64",
        "int64",
        "float32",
        "int64",
        "bool",
        "float32",
    ]


def test_versions_that_are_no_numbers_are_indices_into_names() -> None:
    turns = [Given([1], [2], [-1.0], version="default"), Given([3], [4], [-1.0], version="lora-b")]
    found = lists(areal.fields(rows(turns)[0]))
    assert found["versions"] == [[-1, 0, -1, 1]]
    assert found["weight_version_names"] == ["default", "lora-b"]


def test_no_reward_is_unfit() -> None:
    with pytest.raises(Unfit, match="no reward"):
        areal.fields(rows(TWO_TURNS, reward=None)[0])


@settings(max_examples=150, deadline=None)
@given(conversations())
def test_alignment(turns: list[Given]) -> None:
    wanted = expected(turns)
    if True not in wanted.sampled:
        with pytest.raises(Unfit, match="no token was sampled"):
            areal.fields(rows(turns)[0])
        return
    found = lists(areal.fields(rows(turns)[0]))
    assert found["input_ids"] == [wanted.tokens]
    assert found["loss_mask"] == [[int(sampled) for sampled in wanted.sampled]]
    assert found["logprobs"] == [np.array(wanted.logprobs, np.float32).tolist()]
    versions = [
        int(turns[turn].version) if sampled else -1
        for turn, sampled in zip(wanted.turn_of, wanted.sampled, strict=True)
    ]
    assert found["versions"] == [versions]
    assert found["attention_mask"] == [[True] * len(wanted.tokens)]


def test_areal_joins_rows_to_a_batch() -> None:
    """`concat_padded_tensors` is what AReaL's workflows do with the trajectories of a group."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = pytest.importorskip("areal.utils.data", reason="areal is not installed, see docs/export.md")
    long, short = rows(TWO_TURNS)[0], rows([Given([1], [7], [-3.0])], reward=0.0)[0]
    batch = data.concat_padded_tensors(
        [{name: torch.from_numpy(np.array(areal.fields(row)[name])) for name in TENSORS} for row in (long, short)]
    )
    assert batch["input_ids"].shape == (2, 5)
    assert batch["attention_mask"].tolist() == [[True] * 5, [True, True, False, False, False]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 0, 1], [0, 1, 0, 0, 0]]
    assert batch["logprobs"][1].tolist() == [0.0, -3.0, 0.0, 0.0, 0.0]
    assert batch["rewards"].tolist() == [1.0, 0.0]
