"""Samples as the server writes them, read with numpy alone and with the format's own package."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from turnlog import NotTurnlog
from turnlog.client.samples import parse

META = {
    "samples": [
        {"response": "a", "status": "completed", "nulls": ["rollout_indexer_topk"]},
        {"response": "b", "nulls": []},
    ],
    "session_metadata": {"status": "open", "reward": 0.5},
    "empty_reason": None,
}


def written(meta: Any = META) -> tuple[dict[str, np.ndarray[Any, Any]], bytes]:
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "tokens.0": np.arange(5, dtype=np.int64),
        "loss_mask.0": np.array([1, 0, 1], np.uint8),
        "rollout_log_probs.0": np.array([-0.25, 0.0, -1.5]),
        "rollout_routed_experts.0": np.arange(24, dtype=np.int32).reshape(4, 3, 2),
        "tokens.1": np.array([], np.int64),
        "_samples_meta": np.frombuffer(json.dumps(meta).encode(), np.uint8),
    }
    return tensors, safetensors.numpy.save(tensors, {"format": "pt"})


def test_samples_are_those_of_the_file() -> None:
    tensors, content = written()
    found = parse(content)
    assert (found.empty_reason, found.session) == (None, {"status": "open", "reward": 0.5})
    assert [sample.fields for sample in found.samples] == [{"response": "a", "status": "completed"}, {"response": "b"}]
    assert [sorted(sample.arrays) for sample in found.samples] == [
        ["loss_mask", "rollout_log_probs", "rollout_routed_experts", "tokens"],
        ["tokens"],
    ]
    for index, sample in enumerate(found.samples):
        for name, array in sample.arrays.items():
            expected = tensors[f"{name}.{index}"]
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(array, expected)


def test_arrays_can_be_written_to() -> None:
    [first, _] = parse(written()[1]).samples
    first.arrays["tokens"][0] = 9
    assert first.arrays["tokens"].tolist() == [9, 1, 2, 3, 4]


@pytest.mark.parametrize("content", [b"", b"short", b'{"error": {}}', (2**40).to_bytes(8, "little") + b"{}"])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(NotTurnlog):
        parse(content)


@pytest.mark.parametrize("meta", [{}, {"samples": []}, {**META, "samples": 3}, []])
def test_a_file_without_samples_is_refused(meta: Any) -> None:
    with pytest.raises(NotTurnlog):
        parse(written(meta)[1])


def test_a_file_that_was_cut_is_refused() -> None:
    content = written()[1]
    with pytest.raises(NotTurnlog):
        parse(content[:-1])
