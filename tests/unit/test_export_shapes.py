"""The shapes of Turnlog, slime, miles, verl and SkyRL by readers of their documented layout, and the registry."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given as property_of
from hypothesis import settings
from shape_rows import TWO_SEGMENTS, TWO_TURNS, Expected, Given, conversations, expected, experts, rows

from app.domain.events import VersionSpan
from app.errors import InvalidRequest
from app.export import formats, jsontext
from app.export.columns import ITEMS, Column, depth
from app.export.containers.writer import EXCLUSION
from app.export.row import Routing, Row, Unfit
from app.export.shapes import miles, skyrl, slime, turnlog, verl

JSON = dict[str, Any]

TRAINERS = {"slime": slime.fields, "miles": miles.fields, "verl": verl.fields, "skyrl": skyrl.fields}


def read(shape: str, row: Row) -> JSON:
    """As a reader of NDJSON has it."""
    found: JSON = json.loads(jsontext.encode(formats.of_row("ndjson", shape, row)))
    return found


@dataclass
class Response:
    """What every response-aligned shape says, by its own names."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float]

    def check(self, wanted: Expected) -> None:
        assert self.prompt + self.response == wanted.tokens
        assert len(self.prompt) == wanted.first_sampled
        assert [False] * len(self.prompt) + [bool(one) for one in self.mask] == wanted.sampled
        assert len(self.logprobs) == len(self.response)
        assert [0.0] * len(self.prompt) + self.logprobs == pytest.approx(wanted.logprobs, rel=1e-6, abs=1e-38)
        assert all(value == 0.0 for value, one in zip(self.logprobs, self.mask, strict=True) if not one)


@dataclass
class SlimeSample:
    """slime's and miles' `Sample`: `from_dict` sets the fields that it knows and keeps any other as an attribute."""

    status: str
    group_index: int | None = None
    index: int | None = None
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: list[Any] | None = None
    rollout_indexer_topk: list[Any] | None = None
    metadata: JSON = field(default_factory=dict)
    rollout_id: int | None = None
    adapter: str | None = None

    def validate(self) -> None:
        """What both check before training."""
        assert self.status in ("pending", "completed", "truncated", "aborted", "failed")
        assert 0 <= self.response_length <= len(self.tokens)
        assert self.loss_mask is not None
        assert self.rollout_log_probs is not None
        assert len(self.loss_mask) == len(self.rollout_log_probs) == self.response_length
        for rows_of in (self.rollout_routed_experts, self.rollout_indexer_topk):
            assert rows_of is None or len(rows_of) == len(self.tokens) - 1
        assert all(isinstance(version, str) for version in self.weight_versions)


def response(shape: str, found: JSON) -> Response:
    match shape:
        case "slime" | "miles":
            sample = SlimeSample(**found)
            sample.validate()
            assert sample.loss_mask is not None
            assert sample.rollout_log_probs is not None
            start = len(sample.tokens) - sample.response_length
            return Response(sample.tokens[:start], sample.tokens[start:], sample.loss_mask, sample.rollout_log_probs)
        case "verl":
            return Response(
                found["prompt_ids"], found["response_ids"], found["response_mask"], found["response_logprobs"]
            )
    return Response(found["prompt_token_ids"], found["response_ids"], found["loss_masks"], found["rollout_logprobs"])


def identity(shape: str, found: JSON) -> JSON:
    """Where each shape keeps what an export is resumed by."""
    match shape:
        case "slime" | "miles":
            return dict(found["metadata"]["turnlog"])
        case "verl":
            return dict(found["extra_fields"])
    return found


@pytest.mark.parametrize("shape", TRAINERS)
@settings(max_examples=80, deadline=None)
@property_of(turns=conversations())
def test_alignment(shape: str, turns: list[Given]) -> None:
    (row,) = rows(turns)
    wanted = expected(turns)
    if True not in wanted.sampled:
        with pytest.raises(Unfit, match="no token was sampled"):
            TRAINERS[shape](row)
        return
    response(shape, read(shape, row)).check(wanted)


@pytest.mark.parametrize("shape", TRAINERS)
def test_two_turns_with_a_trimmed_token(shape: str) -> None:
    """The 4 that the first turn sampled was trimmed; the prompt's 5 stands in the response, masked."""
    (row,) = rows(TWO_TURNS)
    found = response(shape, read(shape, row))
    assert (found.prompt, found.response, found.mask) == ([1, 2], [3, 5, 6], [1, 0, 1])
    assert found.logprobs == [-0.5, 0.0, -0.125]


@pytest.mark.parametrize("shape", TRAINERS)
def test_who_a_row_is(shape: str) -> None:
    first, second = rows(TWO_SEGMENTS, group_id="17", attempt=3)
    for row in (first, second):
        assert {name: identity(shape, read(shape, row))[name] for name in ("session_id", "group_id", "attempt")} == {
            "session_id": "s",
            "group_id": "17",
            "attempt": 3,
        }
    told = [identity(shape, read(shape, row)) for row in (first, second)]
    assert [one["cursor"] for one in told] == ["after-s-0", "after-s-1"]
    assert [one["segment"] for one in told] == [0, 1]
    assert [one["status"] for one in told] == ["completed", "aborted"]


@pytest.mark.parametrize("shape", TRAINERS)
def test_an_advantage_is_handed_on(shape: str) -> None:
    with_one = identity(shape, read(shape, rows(TWO_TURNS, advantage=-0.5)[0]))
    without = identity(shape, read(shape, rows(TWO_TURNS)[0]))
    assert (with_one["advantage"], without.get("advantage")) == (-0.5, None)


@pytest.mark.parametrize("shape", [name for name, entry in formats.SHAPES.items() if entry.of_row is not None])
def test_every_field_has_a_column(shape: str) -> None:
    (row,) = rows(TWO_TURNS, advantage=0.5, routing=experts(5))
    assert set(formats.of_row("parquet", shape, row)) <= set(formats.SHAPES[shape].columns)


def leaves(column: Column) -> list[str]:
    return [column] if isinstance(column, str) else [leaf for inner in column.values() for leaf in leaves(inner)]


@pytest.mark.parametrize("shape", formats.SHAPES)
def test_columns_are_of_types_that_there_are(shape: str) -> None:
    for name, column in formats.SHAPES[shape].columns.items():
        for leaf in leaves(column):
            dimensions, item = depth(leaf)
            assert item in (ITEMS if dimensions else {"text", "json", "bytes", "bool", "int64", "float64"}), name
        assert column == EXCLUSION.get(name, column), name


EXPERTS = {
    "slime": ("rollout_routed_experts", "int32"),
    "miles": ("rollout_routed_experts", "int32"),
    "verl": ("routed_experts", "int16"),
    "skyrl": ("rollout_expert_indices", "uint8"),
}
"""Where each shape holds the experts, and in what type those that a byte can hold."""


class TestRouting:
    @pytest.mark.parametrize("shape", TRAINERS)
    def test_a_row_for_each_token_but_the_last(self, shape: str) -> None:
        given = experts(5)
        routing = given["routed_experts"]
        assert routing is not None
        name, dtype = EXPERTS[shape]
        found = TRAINERS[shape](rows(TWO_TURNS, routing=given)[0])[name]
        assert isinstance(found, np.ndarray)
        assert (found.dtype.name, found.shape) == (dtype, (4, 2, 3))
        assert np.array_equal(found, routing.ids)

    @pytest.mark.parametrize("shape", TRAINERS)
    @pytest.mark.parametrize(
        ("routing", "reason"),
        [
            (None, "tombstoned"),
            (Routing(np.zeros((3, 2, 3), np.uint8), 1), "rows 1 to 4 are there, 4 are needed"),
            (Routing(np.zeros((3, 2, 3), np.uint8), 0), "rows 0 to 3 are there, 4 are needed"),
        ],
    )
    def test_what_is_not_whole_is_null_with_a_reason(self, shape: str, routing: Routing | None, reason: str) -> None:
        found = read(shape, rows(TWO_TURNS, routing={"routed_experts": routing})[0])
        assert found[EXPERTS[shape][0]] is None
        told = identity(shape, found)
        assert told["rollout_expert_indices_missing" if shape == "skyrl" else "routed_experts_missing"] == reason

    @pytest.mark.parametrize("shape", TRAINERS)
    def test_rows_of_which_the_shape_is_not_known_are_flat(self, shape: str) -> None:
        routing = Routing(np.arange(24, dtype=np.uint8).reshape(4, 6), 0)
        row = TRAINERS[shape](rows(TWO_TURNS, routing={"routed_experts": routing})[0])
        name, dtype = EXPERTS[shape]
        found = row[name]
        assert isinstance(found, np.ndarray)
        assert (found.dtype.name, found.tolist()) == (dtype, routing.ids.tolist())
        told = identity(shape, read(shape, rows(TWO_TURNS, routing={"routed_experts": routing})[0]))
        assert told.get("rollout_expert_indices_missing") is told.get("routed_experts_missing") is None

    @pytest.mark.parametrize(("largest", "dtype"), [(255, "uint8"), (256, "int16"), (32767, "int16"), (32768, "int32")])
    def test_skyrl_takes_the_smallest_type(self, largest: int, dtype: str) -> None:
        ids = np.full((4, 1, 1), largest, np.int32)
        found = skyrl.fields(rows(TWO_TURNS, routing={"routed_experts": Routing(ids, 0)})[0])["rollout_expert_indices"]
        assert isinstance(found, np.ndarray)
        assert (found.dtype.name, int(found.max())) == (dtype, largest)

    def test_verl_holds_ids_in_int16(self) -> None:
        ids = np.full((4, 1, 1), 32768, np.uint16)
        found = read("verl", rows(TWO_TURNS, routing={"routed_experts": Routing(ids, 0)})[0])
        assert found["routed_experts"] is None
        assert found["extra_fields"]["routed_experts_missing"] == "an id exceeds 32767"

    def test_miles_has_the_indexer_too(self) -> None:
        ids = np.arange(8, dtype=np.uint16).reshape(4, 1, 2)
        found = miles.fields(rows(TWO_TURNS, routing={"indexer_topk": Routing(ids, 0)})[0])["rollout_indexer_topk"]
        assert isinstance(found, np.ndarray)
        assert (found.dtype.name, found.tolist()) == ("int32", ids.tolist())

    def test_a_row_of_turnlog_holds_what_is_there(self) -> None:
        ids = np.arange(9, dtype=np.uint16).reshape(3, 3)
        found = read("turnlog", rows(TWO_TURNS, routing={"routed_experts": Routing(ids, 1), "indexer_topk": None})[0])
        assert base64.b64decode(found["routed_experts"]) == ids.tobytes()
        assert (found["row_start"], found["rows"], found["dtype"], found["shape"]) == (1, 3, "uint16", [3, 3])
        assert (found["indexer_topk"], found["tombstoned"]) == (None, ["indexer_topk"])


def test_the_row_of_turnlog() -> None:
    (row,) = rows(TWO_TURNS, group_id="g", attempt=1, metadata={"task": 5})
    generated = {"engine": "http://engine", "dispatched": None, "adapter": None, "parts": []}
    found = read("turnlog", row)
    assert found == {
        "session_id": "s",
        "segment": 0,
        "group_id": "g",
        "attempt": 1,
        "parent_session_id": None,
        "adapter": None,
        "status": "truncated",
        "final": True,
        "as_of_seq": 9,
        "reward": 1.0,
        "reward_components": {"exact": 1.0},
        "turn_rewards": {},
        "advantage": None,
        "prompt_length": 2,
        "response_length": 3,
        "tokens": [1, 2, 3, 5, 6],
        "loss_mask": [0, 0, 1, 0, 1],
        "sampled_mask": [0, 0, 1, 0, 1],
        "logprobs": [0.0, 0.0, -0.5, 0.0, -0.125],
        "weight_versions": [-1, -1, 3, -1, 4],
        "weight_version_names": [],
        "weight_version_regressed": False,
        "turns": [
            {"turn": 1, "start": 0, "output_start": 2, "end": 3, "finish_reason": "stop", **generated},
            {"turn": 2, "start": 3, "output_start": 4, "end": 5, "finish_reason": "length", **generated},
        ],
        "segment_cause": None,
        "messages": [
            {"role": "user", "content": "ask"},
            {"role": "assistant", "content": "answer"},
        ]
        * 2,
        "metadata": {"task": 5},
        "provenance": {
            "engines": ["http://engine"],
            "dialects": ["sglang"],
            "created_at": 1000.0,
            "committed_at": 2000.0,
            "turnlog_version": "0.1.0",
        },
        "cursor": "after-s-0",
        "rollout_id": "s",
    }
    assert read("turnlog", rows(TWO_TURNS, advantage=0.5)[0])["advantage"] == 0.5
    assert set(turnlog.fields(row)) < set(turnlog.COLUMNS)


class TestSlime:
    def test_a_group_that_is_a_number_is_its_index(self) -> None:
        for group_id, index in [("17", 17), ("task-17", None), (None, None), ("٣", None), ("9" * 19, None)]:
            found = read("slime", rows(TWO_TURNS, group_id=group_id)[0])
            assert found["group_index"] == index
            assert found["metadata"]["turnlog"].get("group_id") == group_id

    def test_rows_of_a_session_are_one_rollout(self) -> None:
        first, second = (read("slime", row)["rollout_id"] for row in rows(TWO_SEGMENTS))
        (other,) = (read("slime", row)["rollout_id"] for row in rows(TWO_TURNS, session_id="t"))
        assert first == second != other
        assert 0 <= first < 2**53

    def test_metadata_is_the_sessions_own(self) -> None:
        found = read("slime", rows(TWO_TURNS, metadata={"label": "x", "turnlog": 1})[0])["metadata"]
        assert found["label"] == "x"
        assert found["turnlog"]["session_id"] == "s"

    def test_versions_are_the_engines_names_a_turn(self) -> None:
        assert read("slime", rows(TWO_TURNS)[0])["weight_versions"] == ["3", "4"]

    def test_a_turn_under_two_versions_gives_both(self) -> None:
        (row,) = rows(TWO_TURNS)
        spans = [VersionSpan("a", 2, 3), VersionSpan("b", 4, 5)]
        one_turn = [msgspec.structs.replace(row.sample.turns[0], end=5)]
        sample = msgspec.structs.replace(row.sample, version_spans=spans, turns=one_turn)
        assert slime.weight_versions(sample) == ["a", "b"]

    @pytest.mark.parametrize("shape", ["slime", "miles", "verl"])
    def test_no_reward_is_null(self, shape: str) -> None:
        found = read(shape, rows(TWO_TURNS, reward=None)[0])
        assert found["reward_score" if shape == "verl" else "reward"] is None


class TestVerl:
    def test_groups_by_uid(self) -> None:
        assert read("verl", rows(TWO_TURNS, group_id="g")[0])["uid"] == "g"
        assert read("verl", rows(TWO_TURNS, group_id=None)[0])["uid"] == "s"

    def test_what_went_in_and_out_counts(self) -> None:
        assert read("verl", rows(TWO_TURNS)[0])["num_turns"] == 4


class TestSkyrl:
    def test_needs_a_reward(self) -> None:
        with pytest.raises(Unfit, match="no reward"):
            skyrl.fields(rows(TWO_TURNS, reward=None)[0])

    def test_steps_end_with_the_last_segment(self) -> None:
        found = [read("skyrl", row) for row in rows(TWO_SEGMENTS, attempt=4)]
        assert [one["is_last_step"] for one in found] == [False, True]
        assert [one["trajectory_ids"] for one in found] == [{"instance_id": "g", "repetition_id": 4}] * 2

    def test_sessions_without_an_attempt_are_told_apart(self) -> None:
        first, second = (
            read("skyrl", rows(TWO_TURNS, session_id=name, attempt=None)[0])["trajectory_ids"] for name in "st"
        )
        assert first["instance_id"] == second["instance_id"] == "g"
        assert first["repetition_id"] != second["repetition_id"]

    def test_why_it_ended(self) -> None:
        assert [read("skyrl", row)["stop_reasons"] for row in rows(TWO_SEGMENTS)] == ["stop", "abort"]
        assert read("skyrl", rows(TWO_TURNS)[0])["stop_reasons"] == "length"


class TestRegistry:
    def test_what_there_is(self) -> None:
        for format in formats.FORMATS:
            formats.require(format, "turnlog")
        for shape in formats.SHAPES:
            formats.require("ndjson", shape)

    @pytest.mark.parametrize(
        ("format", "shape", "named"),
        [("csv", "turnlog", "format=csv"), ("ndjson", "ppo", "shape=ppo"), ("atif", "verl", "format=atif")],
    )
    def test_what_there_is_not_is_named(self, format: str, shape: str, named: str) -> None:
        with pytest.raises(InvalidRequest, match=f"{named} .*(parquet|skyrl)"):
            formats.require(format, shape)

    @pytest.mark.parametrize("format", formats.FORMATS)
    def test_a_writer_of_each(self, format: str) -> None:
        (row,) = rows(TWO_TURNS)
        writer = formats.open_writer(format, "turnlog", True)
        left_out = {"session_id": "s", "segment": 0, "turn": 1, formats.EXCLUDED: "rolled back", "cursor": "c"}
        try:
            pieces = [*writer.write([formats.of_row(format, "turnlog", row), left_out]), *writer.finish()]
        finally:
            writer.close()
        assert b"rolled back" in b"".join(pieces) or format == "parquet"

    def test_only_atropos_takes_groups(self) -> None:
        assert [shape for shape in formats.SHAPES if formats.takes_groups(shape)] == ["atropos"]
        assert formats.of_group("atropos", rows(TWO_TURNS))["group_id"] == "g"
        with pytest.raises(ValueError, match="whole group"):
            formats.of_row("ndjson", "atropos", rows(TWO_TURNS)[0])
        with pytest.raises(ValueError, match="one row"):
            formats.of_group("verl", rows(TWO_TURNS))


def test_the_versions_of_a_long_session_take_no_time() -> None:
    """Each of its turns is looked at once: as turns times spans it was nine seconds."""
    (row,) = rows(TWO_TURNS)
    numbers = range(20_000)
    turns = [msgspec.structs.replace(row.sample.turns[0], output_start=2 * at, end=2 * at + 2) for at in numbers]
    spans = [VersionSpan(str(at), 2 * at, 2 * at + 2) for at in numbers]
    sample = msgspec.structs.replace(row.sample, version_spans=spans, turns=turns)
    started = time.process_time()
    assert slime.weight_versions(sample) == [str(at) for at in numbers]
    assert time.process_time() - started < 1
