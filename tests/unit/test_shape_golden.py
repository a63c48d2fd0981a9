"""What a row of each shape holds: one session's row in full, any conversation's tokens, and what no row can hold."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tables
from hypothesis import given, settings
from integration.corpus import GENERATIONS, SINGLE, generations, identity, parts
from shape_rows import TWO_SEGMENTS, TWO_TURNS, Expected, Given, conversations, expected, experts, rows

from app.export import formats, jsontext
from app.export.row import Routing, Row, Unfit

JSON = dict[str, Any]


def read(shape: str, row: Row) -> JSON:
    """As a reader of NDJSON has it."""
    takes_groups = formats.takes_groups(shape)
    fields = formats.of_group(shape, [row]) if takes_groups else formats.of_row("ndjson", shape, row)
    found: JSON = json.loads(jsontext.encode(fields))
    return found


GOLDEN = [shape for shape in formats.SHAPES if not formats.takes_sessions(shape)]
"""A tree is compared with the rows that it holds: `tests/integration/test_export_tree.py`."""


@pytest.mark.parametrize("shape", GOLDEN)
def test_a_row_in_full(shape: str) -> None:
    """The 4 that the first turn sampled was trimmed; the prompt's 5 stands in the response, masked."""
    (row,) = rows(TWO_TURNS, reward=0.5, advantage=-0.5, attempt=2, metadata={"env_name": "math"})
    assert read(shape, row) == tables.shape(shape)


@pytest.mark.parametrize("shape", GOLDEN)
def test_every_field_has_a_column(shape: str) -> None:
    (row,) = rows(TWO_TURNS, advantage=0.5, routing=experts(5))
    takes_groups = formats.takes_groups(shape)
    fields = formats.of_group(shape, [row]) if takes_groups else formats.of_row("parquet", shape, row)
    assert set(fields) <= set(formats.SHAPES[shape].columns)


@pytest.mark.parametrize("shape", [*SINGLE, *GENERATIONS])
def test_without_an_advantage_there_is_none(shape: str) -> None:
    found = identity(shape, read(shape, rows(TWO_TURNS)[0]))
    assert found.get("advantage") is found.get("advantages") is None


@pytest.mark.parametrize("shape", [*SINGLE, *GENERATIONS])
def test_a_row_for_each_segment(shape: str) -> None:
    told = [identity(shape, read(shape, row)) for row in rows(TWO_SEGMENTS, group_id="17", attempt=3)]
    assert [(one["session_id"], one["group_id"], one["attempt"]) for one in told] == [("s", "17", 3)] * 2
    assert [one["cursor"] for one in told] == ["after-s-0", "after-s-1"]
    assert [one["segment"] for one in told] == [0, 1]
    assert [one["status"] for one in told] == ["completed", "aborted"]


def check_names(shape: str, row: JSON, turns: list[Given], wanted: Expected) -> None:
    """What is told of each token beside its logprob."""
    each = list(zip(wanted.turn_of, wanted.sampled, strict=True))
    if shape == "xtuner":
        assert row["response_model_steps"] == [int(turns[turn].version) for turn, sampled in each if sampled]
    if shape == "trl-async":
        assert row["model_version"] == min(int(turns[turn].version) for turn, sampled in each if sampled)
    if shape == "areal":
        assert row["versions"] == [[int(turns[turn].version) if sampled else -1 for turn, sampled in each]]
    if shape == "prime-rl":
        asked = [turns[turn].params.get("temperature") for turn in wanted.turn_of]
        assert row["temperatures"] == [1.0 if one is None else one for one in asked]
    if shape in ("prime-rl", "tinker"):
        advantages = [0.5 if sampled else 0.0 for _, sampled in each]
        assert row["advantages"] == advantages[1 if shape == "tinker" else 0 :]


@pytest.mark.parametrize("shape", SINGLE)
@settings(max_examples=80, deadline=None)
@given(turns=conversations())
def test_tokens_masks_and_logprobs_are_in_step(shape: str, turns: list[Given]) -> None:
    (row,) = rows(turns, advantage=0.5)
    wanted = expected(turns)
    unfit = True not in wanted.sampled or (shape == "tinker" and wanted.first_sampled == 0)
    if unfit and shape != "turnlog":
        with pytest.raises(Unfit, match="sampled"):
            read(shape, row)
        return
    found = read(shape, row)
    tokens, mask, logprobs = parts(shape, found)
    assert tokens == wanted.tokens
    assert [bool(one) for one in mask] == wanted.sampled
    assert logprobs == pytest.approx(wanted.logprobs, rel=1e-6, abs=1e-38)
    assert all(value == 0.0 for value, sampled in zip(logprobs, wanted.sampled, strict=True) if not sampled)
    if shape in ("miles", "slime", "verl", "skyrl", "trl", "trl-async"):
        assert mask[: wanted.first_sampled + 1] == [0] * wanted.first_sampled + [1]
    check_names(shape, found, turns, wanted)


@pytest.mark.parametrize("shape", GENERATIONS)
@settings(max_examples=80, deadline=None)
@given(turns=conversations())
def test_each_generation_has_its_prompt_and_what_is_left_of_its_output(shape: str, turns: list[Given]) -> None:
    (row,) = rows(turns)
    wanted = expected(turns)
    entries = []
    for number in range(len(turns)):
        each = zip(wanted.turn_of, wanted.sampled, strict=True)
        if places := [place for place, (turn, sampled) in enumerate(each) if sampled and turn == number]:
            start, end = places[0], places[-1] + 1
            entries.append((number + 1, wanted.tokens[:start], wanted.tokens[start:end], wanted.logprobs[start:end]))
    assert generations(shape, read(shape, row)) == entries


@pytest.mark.parametrize(
    ("shape", "turns", "reward", "reason"),
    [
        ("areal", TWO_TURNS, None, "no reward"),
        ("skyrl", TWO_TURNS, None, "no reward"),
        ("atropos", TWO_TURNS, None, "1 of the group's 1 rows"),
        ("prime-rl", [Given([1], [2], [-1.0], params={"temperature": "hot"})], 1.0, "turn 1"),
        ("tinker", [Given([], [1, 2], [-1.0, -1.0])], 1.0, "sampled"),
        ("trl", [Given([1, 2], [], [], finish_reason="abort")], 1.0, "no token was sampled"),
        ("trl-async", [Given([1, 2], [], [], finish_reason="abort")], 1.0, "no token was sampled"),
        ("xtuner", [Given([1, 2], [], [], finish_reason="abort")], 1.0, "no token was sampled"),
    ],
)
def test_what_no_row_can_hold_is_unfit(shape: str, turns: list[Given], reward: float | None, reason: str) -> None:
    with pytest.raises(Unfit, match=reason):
        read(shape, rows(turns, reward=reward)[0])


@pytest.mark.parametrize("shape", ["slime", "miles", "verl", "tinker", "trl", "prime-rl", "openenv", "xtuner", "rllm"])
def test_no_reward_is_null(shape: str) -> None:
    assert read(shape, rows(TWO_TURNS, reward=None)[0])["reward_score" if shape == "verl" else "reward"] is None


def missing(shape: str, routing: Routing | None) -> tuple[object, object]:
    """The experts of a row, and why they are missing."""
    found = read(shape, rows(TWO_TURNS, routing={"routed_experts": routing})[0])
    name = "rollout_expert_indices" if shape == "skyrl" else "routed_experts"
    held = f"rollout_{name}" if shape in ("slime", "miles") else name
    return found[held], identity(shape, found)[f"{name}_missing"]


@pytest.mark.parametrize("shape", ["slime", "miles", "verl", "skyrl", "prime-rl", "xtuner"])
@pytest.mark.parametrize(
    ("routing", "reason"),
    [
        (None, "tombstoned"),
        (Routing(np.zeros((3, 2, 3), np.uint8), 1), "rows 1 to 4 are there; expected 4"),
        (Routing(np.zeros((3, 2, 3), np.uint8), 0), "rows 0 to 3 are there; expected 4"),
    ],
)
def test_experts_that_are_not_whole_are_null_with_a_reason(shape: str, routing: Routing | None, reason: str) -> None:
    assert missing(shape, routing) == (None, reason)


@pytest.mark.parametrize("shape", ["verl", "prime-rl"])
def test_experts_that_int16_cannot_hold_are_null_with_a_reason(shape: str) -> None:
    too_large = Routing(np.full((4, 2, 3), 32768, np.uint16), 0)
    assert missing(shape, too_large) == (None, "an id exceeds 32767")
