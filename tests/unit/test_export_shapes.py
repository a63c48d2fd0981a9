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


@pytest.mark.parametrize("shape", TRAINERS)
def test_routing_has_a_row_for_each_token_but_the_last(shape: str) -> None:
    """Rows of which the shape is not known are flat, and not missing."""
    name, dtype = EXPERTS[shape]
    given = experts(5)["routed_experts"]
    assert given is not None
    for routing in (given, Routing(np.arange(24, dtype=np.uint8).reshape(4, 6), 0)):
        row = rows(TWO_TURNS, routing={"routed_experts": routing})[0]
        found = TRAINERS[shape](row)[name]
        assert isinstance(found, np.ndarray)
        assert (found.dtype.name, found.tolist()) == (dtype, routing.ids.tolist())
        told = identity(shape, read(shape, row))
        assert told.get("rollout_expert_indices_missing") is told.get("routed_experts_missing") is None


@pytest.mark.parametrize(("largest", "dtype"), [(255, "uint8"), (256, "int16"), (32767, "int16"), (32768, "int32")])
def test_skyrl_takes_the_smallest_type_and_miles_the_indexer_too(largest: int, dtype: str) -> None:
    ids = np.full((4, 1, 1), largest, np.int32)
    routing = {name: Routing(ids, 0) for name in ("routed_experts", "indexer_topk")}
    row = rows(TWO_TURNS, routing=routing)[0]
    found = (skyrl.fields(row)["rollout_expert_indices"], miles.fields(row)["rollout_indexer_topk"])
    assert [(one.dtype.name, one.tolist()) for one in found] == [(dtype, ids.tolist()), ("int32", ids.tolist())]  # type: ignore[attr-defined]


def test_a_row_of_turnlog_holds_what_is_there_of_routing() -> None:
    ids = np.arange(9, dtype=np.uint16).reshape(3, 3)
    found = read("turnlog", rows(TWO_TURNS, routing={"routed_experts": Routing(ids, 1), "indexer_topk": None})[0])
    assert base64.b64decode(found["routed_experts"]) == ids.tobytes()
    assert (found["row_start"], found["rows"], found["dtype"], found["shape"]) == (1, 3, "uint16", [3, 3])
    assert (found["indexer_topk"], found["tombstoned"]) == (None, ["indexer_topk"])


def test_slime_has_a_groups_number_one_rollout_and_the_sessions_metadata() -> None:
    for group_id, index in [("17", 17), ("task-17", None), (None, None), ("٣", None), ("9" * 19, None)]:
        found = read("slime", rows(TWO_TURNS, group_id=group_id, metadata={"label": "x", "turnlog": 1})[0])
        assert (found["group_index"], found["metadata"]["label"]) == (index, "x")
        told = found["metadata"]["turnlog"]
        assert (told.get("group_id"), told["session_id"]) == (group_id, "s")
    first, second = (read("slime", row)["rollout_id"] for row in rows(TWO_SEGMENTS))
    (other,) = (read("slime", row)["rollout_id"] for row in rows(TWO_TURNS, session_id="t"))
    assert first == second != other
    assert 0 <= first < 2**53


def test_a_turn_under_two_versions_gives_both() -> None:
    (row,) = rows(TWO_TURNS)
    spans = [VersionSpan("a", 2, 3), VersionSpan("b", 4, 5)]
    one_turn = [msgspec.structs.replace(row.sample.turns[0], end=5)]
    sample = msgspec.structs.replace(row.sample, version_spans=spans, turns=one_turn)
    assert shared.weight_versions(msgspec.structs.replace(row, sample=sample)) == ["a", "b"]


def test_verl_groups_by_uid_and_skyrls_steps_end_with_the_last_segment() -> None:
    assert [read("verl", rows(TWO_TURNS, group_id=group)[0])["uid"] for group in ("g", None)] == ["g", "s"]
    found = [read("skyrl", row) for row in rows(TWO_SEGMENTS, attempt=4)]
    assert [(one["is_last_step"], one["stop_reasons"]) for one in found] == [(False, "stop"), (True, "abort")]
    assert [one["trajectory_ids"] for one in found] == [{"instance_id": "g", "repetition_id": 4}] * 2
    assert read("skyrl", rows(TWO_TURNS)[0])["stop_reasons"] == "length"
    # Sessions without an attempt are told apart.
    ids = [read("skyrl", rows(TWO_TURNS, session_id=name, attempt=None)[0])["trajectory_ids"] for name in "st"]
    assert [one["instance_id"] for one in ids] == ["g", "g"]
    assert ids[0]["repetition_id"] != ids[1]["repetition_id"]


@pytest.mark.parametrize(
    ("format", "shape", "named"),
    [("csv", "turnlog", "format=csv"), ("ndjson", "ppo", "shape=ppo"), ("atif", "verl", "format=atif")],
)
def test_what_there_is_not_is_named(format: str, shape: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{named} .*(parquet|skyrl)"):
        formats.require(ExportQuery(format=format, shape=shape))


def test_only_atropos_takes_groups() -> None:
    assert [shape for shape in formats.SHAPES if formats.takes_groups(shape)] == ["atropos"]
    assert formats.of_group("atropos", rows(TWO_TURNS))["group_id"] == "g"
    with pytest.raises(ValueError, match="whole group"):
        formats.of_row("ndjson", "atropos", rows(TWO_TURNS)[0])
    with pytest.raises(ValueError, match="one row"):
        formats.of_group("verl", rows(TWO_TURNS))
