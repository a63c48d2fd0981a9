"""prime-rl's rows, read by a strict reader of its `TrainingSample`'s fields: prime-rl is no package on PyPI."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from shape_rows import TWO_SEGMENTS, TWO_TURNS, Given, conversations, expected, experts, lists, rows

from app.export import jsontext
from app.export.row import Routing, Unfit
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


def test_two_turns() -> None:
    (row,) = rows(TWO_TURNS, advantage=-0.5, metadata={"env_name": "math", "other": [1]})
    fields = prime_rl.fields(row)
    sample = read(fields)
    assert sample.token_ids == [1, 2, 3, 5, 6]
    assert sample.mask == [False, False, True, False, True]
    assert sample.logprobs == [0.0, 0.0, -0.5, 0.0, -0.125]
    assert sample.temperatures == [0.7, 0.7, 0.7, 1.0, 1.0]
    assert sample.advantages == [0.0, 0.0, -0.5, 0.0, -0.5]
    assert (sample.env_name, sample.trace_id, sample.branch_index) == ("math", "s", 0)
    assert (fields["routed_experts"], fields["routed_experts_missing"]) == (None, None)
    assert set(fields) == set(prime_rl.COLUMNS)


def test_a_segment_is_a_branch() -> None:
    assert [read(prime_rl.fields(row)).branch_index for row in rows(TWO_SEGMENTS)] == [0, 1]


@pytest.mark.parametrize("metadata", [None, {}, {"env_name": None}, {"env_name": 3}, {"env_name": ""}])
def test_the_environment_without_a_name(metadata: dict[str, object] | None) -> None:
    assert prime_rl.fields(rows(TWO_TURNS, metadata=metadata)[0])["env_name"] == prime_rl.ENV_NAME


def test_a_temperature_that_is_no_number_is_unfit() -> None:
    with pytest.raises(Unfit, match="turn 1"):
        prime_rl.fields(rows([Given([1], [2], [-1.0], params={"temperature": "hot"})])[0])


@settings(max_examples=150, deadline=None)
@given(conversations())
def test_alignment(turns: list[Given]) -> None:
    wanted = expected(turns)
    if True not in wanted.sampled:
        with pytest.raises(Unfit, match="no token was sampled"):
            prime_rl.fields(rows(turns)[0])
        return
    sample = read(prime_rl.fields(rows(turns, advantage=2.0)[0]))
    assert sample.token_ids == wanted.tokens
    assert sample.mask == wanted.sampled
    assert sample.logprobs == wanted.logprobs
    named = [turn.params.get("temperature") for turn in turns]
    assert sample.temperatures == [1.0 if named[turn] is None else named[turn] for turn in wanted.turn_of]
    assert sample.advantages == [2.0 if sampled else 0.0 for sampled in wanted.sampled]


def test_experts_have_a_row_for_each_token_and_the_last_is_zero() -> None:
    routing = experts(5)
    read_experts = read(prime_rl.fields(rows(TWO_TURNS, routing=routing)[0])).routed_experts
    assert read_experts is not None
    ids = np.frombuffer(read_experts.data, read_experts.dtype).reshape(read_experts.shape)
    assert ids.shape == (5, 2, 3)
    assert ids.dtype == np.int16
    assert ids[:-1].tolist() == np.arange(24).reshape(4, 2, 3).tolist()
    assert not ids[-1].any()


@pytest.mark.parametrize(
    ("routing", "reason"),
    [
        (None, "tombstoned"),
        (Routing(np.zeros((3, 2, 3), np.uint8), 0), "rows 0 to 3 are there, 4 are needed"),
        (Routing(np.zeros((3, 2, 3), np.uint8), 1), "rows 1 to 4 are there, 4 are needed"),
        (Routing(np.full((4, 2, 3), 40_000, np.uint16), 0), "an id exceeds 32767"),
    ],
)
def test_experts_that_do_not_fit_are_left_out_with_a_reason(routing: Routing | None, reason: str) -> None:
    found = lists(prime_rl.fields(rows(TWO_TURNS, routing={"routed_experts": routing})[0]))
    assert (found["routed_experts"], found["routed_experts_missing"]) == (None, reason)
