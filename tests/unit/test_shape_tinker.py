"""Tinker's rows: shifted by one, and loaded by Tinker's own `Datum`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from shape_rows import TWO_TURNS, Given, conversations, expected, lists, rows

from app.export.row import Unfit
from app.export.shapes import tinker as shape


def test_two_turns() -> None:
    (row,) = rows(TWO_TURNS, advantage=-2.0)
    found = lists(shape.fields(row))
    assert found["model_input"] == [1, 2, 3, 5]
    assert found["target_tokens"] == [2, 3, 5, 6]
    assert found["mask"] == [0.0, 1.0, 0.0, 1.0]
    assert found["logprobs"] == [0.0, -0.5, 0.0, -0.125]
    assert found["advantages"] == [0.0, -2.0, 0.0, -2.0]
    assert (found["session_id"], found["reward"], found["cursor"]) == ("s", 1.0, "after-s-0")
    assert set(found) == set(shape.COLUMNS)


def test_without_advantages_and_without_a_reward() -> None:
    found = shape.fields(rows(TWO_TURNS, reward=None)[0])
    assert found["advantages"] is None
    assert found["reward"] is None


def test_a_sampled_first_token_is_unfit() -> None:
    with pytest.raises(Unfit):
        shape.fields(rows([Given([], [1, 2], [-1.0, -1.0])])[0])


@settings(max_examples=150, deadline=None)
@given(conversations())
def test_alignment(turns: list[Given]) -> None:
    (row,) = rows(turns, advantage=0.5)
    wanted = expected(turns)
    if wanted.first_sampled in (0, len(wanted.tokens)):
        with pytest.raises(Unfit):
            shape.fields(row)
        return
    found = lists(shape.fields(row))
    assert [*wanted.tokens[:1], *found["target_tokens"]] == wanted.tokens
    assert [*found["model_input"], *wanted.tokens[-1:]] == wanted.tokens
    assert [0.0, *found["logprobs"]] == wanted.logprobs
    assert [False, *map(bool, found["mask"])] == wanted.sampled
    assert found["advantages"] == [0.5 if sampled else 0.0 for sampled in wanted.sampled[1:]]


def test_tinker_loads_it() -> None:
    tinker = pytest.importorskip("tinker", reason="tinker is not installed: pip install tinker")
    found = lists(shape.fields(rows(TWO_TURNS, advantage=-2.0)[0]))
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(found["model_input"]),
        loss_fn_inputs={name: found[name] for name in ("target_tokens", "logprobs", "advantages")},
    )
    assert datum.model_input.to_ints() == [1, 2, 3, 5]
    inputs = datum.loss_fn_inputs
    assert {name: tensor.dtype for name, tensor in inputs.items()} == {
        "target_tokens": "int64",
        "logprobs": "float32",
        "advantages": "float32",
    }
    assert inputs["target_tokens"].tolist() == [2, 3, 5, 6]
    assert all(tensor.shape == [datum.model_input.length] for tensor in inputs.values())


def test_tinker_takes_the_arrays_as_they_are() -> None:
    tinker = pytest.importorskip("tinker", reason="tinker is not installed: pip install tinker")
    found = shape.fields(rows(TWO_TURNS, advantage=-2.0)[0])
    names = ("target_tokens", "logprobs", "advantages", "mask")
    tokens = found["model_input"]
    assert isinstance(tokens, np.ndarray)
    datum = tinker.Datum(tinker.ModelInput.from_ints(tokens.tolist()), {name: found[name] for name in names})
    assert datum.loss_fn_inputs["mask"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert datum.loss_fn_inputs["logprobs"].tolist() == [0.0, -0.5, 0.0, -0.125]
