"""Tinker's rows: shifted by one, and loaded by Tinker's own `Datum`."""

from __future__ import annotations

import pytest
from shape_rows import TWO_TURNS, lists, rows

from app.export.shapes import tinker as shape


def test_tinker_loads_it() -> None:
    """Lists, as from a line, and the arrays as they are."""
    tinker = pytest.importorskip("tinker", reason="tinker is not installed: pip install tinker")
    fields = shape.fields(rows(TWO_TURNS, advantage=-2.0)[0])
    for found in (fields, lists(fields)):
        names = ("target_tokens", "logprobs", "advantages", "mask")
        model_input = tinker.ModelInput.from_ints(lists(fields)["model_input"])
        datum = tinker.Datum(model_input, {name: found[name] for name in names if name != "mask" or found is fields})
        inputs = datum.loss_fn_inputs
        types = {"target_tokens": "int64", "logprobs": "float32", "advantages": "float32"}
        assert {name: inputs[name].dtype for name in types} == types
        assert inputs["target_tokens"].tolist() == [2, 3, 5, 6]
        assert inputs["logprobs"].tolist() == [0.0, -0.5, 0.0, -0.125]
        assert all(tensor.shape == [datum.model_input.length] for tensor in inputs.values())
