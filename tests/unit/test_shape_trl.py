"""TRL's rows: its trainer's own packing, and OpenEnv's traces as its harness reads them."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
from shape_rows import TWO_SEGMENTS, TWO_TURNS, lists, rows

from app.export import jsontext
from app.export.shapes import openenv, trl_async

ABSENT = "trl is not installed: pip install torch==2.13.0 trl==1.16.0 openenv==0.10.0"


@pytest.fixture
def worker() -> Any:
    for package in ("torch", "datasets", "trl"):
        pytest.importorskip(package, reason=ABSENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker", reason=ABSENT)


def test_trl_packs_each_sampled_token_with_its_logprob(worker: Any) -> None:
    """`TreeRow` is what TRL's asynchronous GRPO makes of `RolloutSample`s: it picks the loss terms itself."""
    from trl.experimental.async_grpo.packing import TreeRow

    fields = trl_async.fields(rows(TWO_TURNS, advantage=0.25)[0])
    types = {name: column.strip("[]") for name, column in trl_async.COLUMNS.items() if str(column).startswith("[")}
    for found in (fields, lists(fields)):  # the arrays as they are, and lists, as from a line
        own = {name: found[name] for name in found if name != "extra_fields"}
        sample = worker.RolloutSample(**{**own, **{name: np.array(own[name], types[name]) for name in types}})
        tree = TreeRow()
        names = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id")
        tree.add({name: getattr(sample, name) for name in names})
        packed = tree.pack()
        assert packed["input_ids"].tolist() == [1, 2, 3, 5, 6]
        assert packed["shift_labels"].tolist() == [-100, 3, -100, 6, -100]
        assert packed["token_index"].tolist() == [1, 3]
        assert packed["old_log_probs"].tolist() == [-0.5, -0.125]
        assert packed["advantages"].tolist() == [0.25, 0.25]


def test_a_session_is_a_trace_of_openenvs_and_trl_chains_its_turns(worker: Any) -> None:
    training = pytest.importorskip("openenv.core.harness.training", reason=ABSENT)
    from trl.experimental.async_grpo import openenv_harness

    whole = [
        json.loads(jsontext.encode(openenv.fields(row)))
        for row in (*rows(TWO_TURNS), *rows(TWO_SEGMENTS, session_id="t"))
    ]
    trace = training.TrainingTrace(turns=[turn for row in whole for turn in row["turns"]])
    assert [turn.node_id for turn in trace.turns] == ["s.1", "s.2", "t.1", "t.2"]
    sequences, _ = worker._chain_to_sequences(openenv_harness._turns_from_training_trace(trace), "s", 0)
    assert [one.input_ids for one in sequences] == [[1, 2, 3, 5, 6], [1, 2, 3], [1, 9, 4]]
    assert [one.completion_mask for one in sequences] == [[0, 0, 1, 0, 1], [0, 0, 1], [0, 0, 1]]
    assert [one.old_log_probs for one in sequences] == [
        [0.0, 0.0, -0.5, 0.0, -0.125],
        [0.0, 0.0, -1.0],
        [0.0, 0.0, -2.0],
    ]
    said = openenv_harness._messages_from_trace(trace.to_trace_entries())
    assert [message["role"] for message in said] == ["user", "assistant"] * 2
