"""Rows of each shape come out of each container as they went in."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as load_tensors
from shape_rows import Given, conversations, expected, experts, lists, rows

from app.export import formats
from app.export.row import Fields, Unfit

NAMES = ("trl", "tinker", "areal", "prime-rl", "atropos")


def made(name: str, conversation: list[Given], advantage: float | None) -> Fields:
    """Raises Unfit."""
    routing = experts(len(expected(conversation).tokens))
    found = rows(conversation, advantage=advantage, routing=routing, metadata={"env_name": "math"})
    return formats.of_group(name, found) if formats.takes_groups(name) else formats.of_row("ndjson", name, found[0])


def written(format: str, name: str, fields: Fields) -> bytes:
    writer = formats.open_writer(format, name, explain=False)
    try:
        return b"".join([*writer.write([fields]), *writer.finish()])
    finally:
        writer.close()


def from_msgpack(data: bytes, name: str) -> dict[str, Any]:
    found: dict[str, Any] = _arrays(msgspec.msgpack.decode(data))
    return found


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"dtype", "shape", "data"} and value["dtype"].startswith(("<", "|")):
            return np.frombuffer(value["data"], value["dtype"]).reshape(value["shape"]).tolist()
        return {key: _arrays(item) for key, item in value.items()}
    return [_arrays(item) for item in value] if isinstance(value, list) else value


def from_parquet(data: bytes, name: str) -> dict[str, Any]:
    columns = formats.SHAPES[name].columns
    (row,) = pq.read_table(io.BytesIO(data)).to_pylist()
    return {key: json.loads(value) if columns[key] == "json" and value else value for key, value in row.items()}


def from_safetensors(data: bytes, name: str) -> dict[str, Any]:
    tensors = load_tensors(data)
    (found,) = json.loads(tensors.pop("_rows_meta").tobytes())["rows"]
    for path, tensor in tensors.items():
        *keys, last = path.removesuffix(".0").split(".")
        place = found
        for key in keys:
            place = place[key]
        value = tensor.tobytes() if last == "data" else tensor.tolist()
        place[int(last) if isinstance(place, list) else last] = value
    row: dict[str, Any] = found
    return row


READERS: Mapping[str, Callable[[bytes, str], dict[str, Any]]] = {
    "msgpack": from_msgpack,
    "parquet": from_parquet,
    "safetensors": from_safetensors,
}


@pytest.mark.parametrize("format", READERS)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(conversations(), st.none() | st.floats(-2, 2))
def test_a_row_comes_out_as_it_went_in(
    format: str, name: str, conversation: list[Given], advantage: float | None
) -> None:
    try:
        fields = made(name, conversation, advantage)
    except Unfit:
        return
    assert READERS[format](written(format, name, fields), name) == lists(fields)
