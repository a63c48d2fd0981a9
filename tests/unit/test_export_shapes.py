"""What the shapes of Turnlog, slime, miles, verl and SkyRL have of their own, and the registry."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from integration.corpus import identity
from shape_rows import TWO_SEGMENTS, TWO_TURNS, experts, rows

from app.errors import InvalidRequest
from app.export import formats, jsontext
from app.export.containers.writer import EXCLUSION
from app.export.query import ExportQuery
from app.export.row import ITEMS, Column, Routing, Row, depth
from app.export.shapes import miles, shared, skyrl, slime, verl
from workers.reply import VersionSpan

JSON = dict[str, Any]

TRAINERS = {"slime": slime.fields, "miles": miles.fields, "verl": verl.fields, "skyrl": skyrl.fields}


def read(shape: str, row: Row) -> JSON:
    """As a reader of NDJSON has it."""
    found: JSON = json.loads(jsontext.encode(formats.of_row("ndjson", shape, row)))
    return found


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

    def test_a_turn_under_two_versions_gives_both(self) -> None:
        (row,) = rows(TWO_TURNS)
        spans = [VersionSpan("a", 2, 3), VersionSpan("b", 4, 5)]
        one_turn = [msgspec.structs.replace(row.sample.turns[0], end=5)]
        sample = msgspec.structs.replace(row.sample, version_spans=spans, turns=one_turn)
        assert shared.weight_versions(msgspec.structs.replace(row, sample=sample)) == ["a", "b"]


class TestVerl:
    def test_groups_by_uid(self) -> None:
        assert read("verl", rows(TWO_TURNS, group_id="g")[0])["uid"] == "g"
        assert read("verl", rows(TWO_TURNS, group_id=None)[0])["uid"] == "s"


class TestSkyrl:
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
    @pytest.mark.parametrize(
        ("format", "shape", "named"),
        [("csv", "turnlog", "format=csv"), ("ndjson", "ppo", "shape=ppo"), ("atif", "verl", "format=atif")],
    )
    def test_what_there_is_not_is_named(self, format: str, shape: str, named: str) -> None:
        with pytest.raises(InvalidRequest, match=f"{named} .*(parquet|skyrl)"):
            formats.require(ExportQuery(format=format, shape=shape))

    def test_only_atropos_takes_groups(self) -> None:
        assert [shape for shape in formats.SHAPES if formats.takes_groups(shape)] == ["atropos"]
        assert formats.of_group("atropos", rows(TWO_TURNS))["group_id"] == "g"
        with pytest.raises(ValueError, match="whole group"):
            formats.of_row("ndjson", "atropos", rows(TWO_TURNS)[0])
        with pytest.raises(ValueError, match="one row"):
            formats.of_group("verl", rows(TWO_TURNS))
