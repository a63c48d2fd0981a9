"""Atropos' groups: what they hold, and Atropos' own model and trainer's batching on them."""

from __future__ import annotations

import json
import warnings

import pytest
import tables
from hypothesis import given, settings
from hypothesis import strategies as st
from shape_rows import TWO_SEGMENTS, TWO_TURNS, Given, conversations, expected, lists, rows

from app.export import jsontext
from app.export.row import Row
from app.export.shapes import atropos

ABSENT = "atroposlib is not installed: pip install torch==2.13.0 atroposlib"

COLD = {"temperature": 0.5}


def group() -> list[Row]:
    return [
        *rows(TWO_TURNS, session_id="a", attempt=0, reward=1.0),
        *rows([Given([1, 2], [7], [-2.0], params=COLD, finish_reason="abort")], session_id="b", attempt=1, reward=0.0),
    ]


def test_a_group_of_two() -> None:
    found = lists(atropos.group_fields(group()))
    assert found == tables.shape("atropos_group")
    assert set(found) == set(atropos.COLUMNS)


def test_a_session_without_a_group_has_a_sequence_for_each_segment() -> None:
    found = lists(atropos.group_fields(rows(TWO_SEGMENTS, group_id=None, reward=0.5, advantage=-1.0)))
    assert found["tokens"] == [[1, 2, 3], [1, 9, 4]]
    assert found["scores"] == [0.5, 0.5]
    assert found["advantages"] == [[0.0, 0.0, -1.0], [0.0, 0.0, -1.0]]
    assert found["rollout_advantages"] == [-1.0, -1.0]
    assert (found["rollout_ids"], found["rollout_rows"], found["rollout_weights"]) == (["s"] * 2, [2, 2], [0.5, 0.5])
    assert (found["group_id"], found["session_ids"], found["segments"]) == (None, ["s", "s"], [0, 1])


@settings(max_examples=100, deadline=None)
@given(st.lists(conversations(), min_size=1, max_size=3))
def test_alignment(members: list[list[Given]]) -> None:
    found = lists(atropos.group_fields([row for turns in members for row in rows(turns)]))
    for index, turns in enumerate(members):
        wanted = expected(turns)
        pairs = list(zip(wanted.tokens, wanted.sampled, strict=True))
        assert found["tokens"][index] == wanted.tokens
        assert found["masks"][index] == [token if sampled else -100 for token, sampled in pairs]
        assert found["inference_logprobs"][index] == [
            logprob if sampled else 1.0 for logprob, sampled in zip(wanted.logprobs, wanted.sampled, strict=True)
        ]


def test_atropos_takes_the_line_and_its_trainer_batches_it() -> None:
    pytest.importorskip("atroposlib", reason=ABSENT)
    pytest.importorskip("torch", reason=ABSENT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from atroposlib.api.server import ScoredData, _scored_data_to_dict
        from example_trainer.data import pad_data_to_good_offset
    line = jsontext.encode(atropos.group_fields(group()))
    item = _scored_data_to_dict(ScoredData.model_validate_json(line))
    assert item["tokens"] == json.loads(line)["tokens"]
    (tokens,), (labels,), (advantages,), (temperatures,), logprobs = pad_data_to_good_offset({"batch": [item]}, 2)
    assert logprobs is not None
    (logprobs,) = logprobs
    assert tokens[0, :4].tolist() == [1, 2, 3, 5]
    assert labels[0, :4].tolist() == [-100, 3, -100, 6]
    assert logprobs[0, :4].tolist() == [1.0, -0.5, 1.0, -0.125]
    assert (labels != -100).sum().item() == 3
    assert advantages.flatten().tolist() == [1.0, -1.0]
    assert temperatures.flatten().tolist() == [1.0, 0.5]
