"""prime-rl's rows, read by a strict reader of its `TrainingSample`'s fields: prime-rl is no package on PyPI."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from shape_rows import TWO_SEGMENTS, TWO_TURNS, experts, rows

from app.export import jsontext
from app.export.shapes import prime_rl


class Experts(msgspec.Struct, forbid_unknown_fields=True):
    data: bytes
    shape: list[int]
    dtype: str


class TrainingSample(msgspec.Struct):
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    routed_experts: Experts | None
    advantages: list[float] | None
    trace_id: str
    branch_index: int


def read(fields: object) -> TrainingSample:
    """As from a line of NDJSON; every stream has the tokens' length."""
    sample = msgspec.json.decode(jsontext.encode(fields), type=TrainingSample)
    streams = (sample.mask, sample.logprobs, sample.temperatures)
    assert {len(stream) for stream in streams} == {len(sample.token_ids)}
    return sample


def test_a_segment_is_a_branch() -> None:
    assert [read(prime_rl.fields(row)).branch_index for row in rows(TWO_SEGMENTS)] == [0, 1]


@pytest.mark.parametrize("metadata", [None, {}, {"env_name": None}, {"env_name": 3}, {"env_name": ""}])
def test_the_environment_without_a_name(metadata: dict[str, object] | None) -> None:
    assert prime_rl.fields(rows(TWO_TURNS, metadata=metadata)[0])["env_name"] == prime_rl.ENV_NAME


def test_experts_have_a_row_for_each_token_and_the_last_is_zero() -> None:
    routing = experts(5)
    read_experts = read(prime_rl.fields(rows(TWO_TURNS, routing=routing)[0])).routed_experts
    assert read_experts is not None
    ids = np.frombuffer(read_experts.data, read_experts.dtype).reshape(read_experts.shape)
    assert ids.shape == (5, 2, 3)
    assert ids.dtype == np.int16
    assert ids[:-1].tolist() == np.arange(24).reshape(4, 2, 3).tolist()
    assert not ids[-1].any()
