"""Tinker's rows: shifted by one, and loaded by Tinker's own `Datum`."""

from __future__ import annotations

import numpy as np
import pytest
from shape_rows import TWO_TURNS, lists, rows

from app.export.shapes import tinker as shape


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
