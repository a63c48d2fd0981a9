"""The body of `POST /sessions/{id}/samples`, read as miles' driver reads it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from shape_rows import TWO_TURNS, Given, conversations, expected, rows

from app.export.row import Routing
from app.export.shapes.miles import samples_body

DTYPES = {
    "tokens": "int64",
    "loss_mask": "uint8",
    "rollout_log_probs": "float64",
    "rollout_routed_experts": "int32",
    "rollout_indexer_topk": "int32",
}

REST = [
    "response",
    "response_length",
    "status",
    "weight_versions",
    "prefix_cache_info",
    "metadata",
    "reward",
    "spec_info",
]


def driver(body: bytes) -> tuple[list[dict[str, Any]], dict[str, Any], str | None]:
    """Samples, session metadata and the reason for none; strict where miles is."""
    tensors = safetensors.numpy.load(body)
    raw = tensors.pop("_samples_meta")
    assert (raw.ndim, raw.dtype.name) == (1, "uint8")
    meta = json.loads(raw.tobytes())
    found = []
    for index, told in enumerate(meta["samples"]):
        nulls = set(told["nulls"])
        assert nulls <= set(DTYPES)
        sample = {name: told[name] for name in REST}
        for name, dtype in DTYPES.items():
            sample[name] = None if name in nulls else tensors.pop(f"{name}.{index}")
            assert sample[name] is None or sample[name].dtype.name == dtype
        found.append(sample)
    assert not tensors
    return found, meta["session_metadata"], meta["empty_reason"]


def test_weight_versions_by_call_have_their_places_in_the_sample() -> None:
    [sample], _, _ = driver(samples_body(rows(TWO_TURNS), {}, None, versions="spans"))
    calls = [[(one["version"], one["abs_start"], one["abs_end"]) for one in call] for call in sample["weight_versions"]]
    assert calls == [[("3", 2, 3)], [("4", 4, 5)]]


@settings(max_examples=80, deadline=None)
@given(conversations())
def test_alignment(turns: list[Given]) -> None:
    [sample], _, _ = driver(samples_body(rows(turns), {}, None))
    wanted = expected(turns)
    start = len(wanted.tokens) - sample["response_length"]
    assert sample["tokens"].tolist() == wanted.tokens
    assert start == wanted.first_sampled
    assert sample["loss_mask"].tolist() == [int(one) for one in wanted.sampled[start:]]
    assert sample["rollout_log_probs"].tolist() == wanted.logprobs[start:]


@pytest.mark.parametrize("reason", ["no_records", "all_truncated"])
def test_no_sample(reason: str) -> None:
    assert driver(samples_body([], {}, reason)) == ([], {}, reason)


def test_payloads_that_are_not_whole_are_null_with_a_reason() -> None:
    routing = {"routed_experts": None, "indexer_topk": Routing(np.zeros((4, 1, 2), np.uint16), 0)}
    [sample], _, _ = driver(samples_body(rows(TWO_TURNS, routing=routing), {}, None))
    assert sample["rollout_routed_experts"] is None
    assert sample["metadata"]["turnlog"]["routed_experts_missing"] == "tombstoned"
    assert sample["rollout_indexer_topk"].shape == (4, 1, 2)


class TestResponse:
    def test_as_decoded(self) -> None:
        [sample], _, _ = driver(samples_body(rows(TWO_TURNS), {}, None, ["<think>x</think>"]))
        assert sample["response"] == "<think>x</think>"

    def test_else_what_the_assistant_said(self) -> None:
        turns = [
            Given([1], [2], [-1.0], message={"role": "assistant", "content": "first"}),
            Given([3], [4], [-1.0], message={"role": "assistant", "content": None, "tool_calls": []}),
            Given([5], [6], [-1.0], message="a completion"),
        ]
        [sample], _, _ = driver(samples_body(rows(turns), {}, None))
        assert sample["response"] == "first\n\na completion"
