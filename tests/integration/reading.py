"""Exports read back, each container with its own library, and compared with the same rows as JSON."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy

Row = dict[str, Any]
CONTAINERS = ("ndjson", "parquet", "safetensors", "msgpack")
DOCUMENTS = ("atif", "messages")


def read(format: str, data: bytes) -> list[Row]:
    """The file's rows with numpy arrays in them; those that `explain` adds have the key `excluded`."""
    readers = {"parquet": read_parquet, "safetensors": read_safetensors, "msgpack": read_msgpack}
    return readers.get(format, read_lines)(data)


def read_lines(data: bytes) -> list[Row]:
    return [json.loads(line) for line in data.splitlines()]


def read_msgpack(data: bytes) -> list[Row]:
    return [_arrays(row) for row in msgpack.Unpacker(io.BytesIO(data), max_buffer_size=0, strict_map_key=False)]


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"dtype", "shape", "data"} and isinstance(value["data"], bytes):
            return np.frombuffer(value["data"], value["dtype"]).reshape(value["shape"])
        return {key: _arrays(item) for key, item in value.items()}
    return [_arrays(item) for item in value] if isinstance(value, list) else value


def read_parquet(data: bytes) -> list[Row]:
    table = pq.read_table(io.BytesIO(data))
    columns = {name: table.column(name) for name in table.column_names}
    return [{name: _value(column[place]) for name, column in columns.items()} for place in range(table.num_rows)]


def _value(scalar: Any) -> Any:
    """Of a list of numbers a numpy array, so that its type is seen."""
    if not scalar.is_valid:
        return None
    if pa.types.is_struct(scalar.type):
        return {name: _value(scalar[name]) for name in scalar}
    if pa.types.is_list(scalar.type):
        if pa.types.is_list(scalar.type.value_type):
            return [_value(item) for item in scalar]
        if not pa.types.is_string(scalar.type.value_type):
            return scalar.values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


def read_safetensors(data: bytes) -> list[Row]:
    tensors = safetensors.numpy.load(data)
    meta = json.loads(tensors.pop("_rows_meta").tobytes())
    rows: list[Row] = meta["rows"]
    for name, tensor in sorted(tensors.items()):
        *path, key, number = name.split(".")
        place: Any = rows[int(number)]
        for part in path:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if isinstance(place, list):
            assert place[int(key)] is None
            place[int(key)] = tensor
        else:
            assert key not in place
            place[key] = tensor
    return [*rows, *meta["excluded"]]


def same(expected: Any, found: Any) -> bool:
    """Is it the value that JSON has, to the bit in the found array's type? A missing key is a null."""
    match found:
        case np.ndarray():
            if isinstance(expected, str):
                return base64.b64decode(expected) == found.tobytes()
            if isinstance(expected, dict):
                # A field that is such a map itself, prime-rl's experts, looks like msgpack's array, and is one.
                raw = np.frombuffer(base64.b64decode(expected["data"]), expected["dtype"]).reshape(expected["shape"])
                return raw.dtype == found.dtype and np.array_equal(raw, found)
            as_found = np.array(expected, found.dtype)
            return found.tobytes() == as_found.tobytes() and (not found.size or as_found.shape == found.shape)
        case bytes():
            return isinstance(expected, str) and base64.b64decode(expected) == found
        case dict():
            return isinstance(expected, dict) and all(
                same(expected.get(key), found.get(key)) for key in expected.keys() | found.keys()
            )
        case list():
            return (
                isinstance(expected, list)
                and len(expected) == len(found)
                and all(same(one, other) for one, other in zip(expected, found, strict=True))
            )
        case str() if not isinstance(expected, str):
            return bool(same(expected, json.loads(found)))
    return bool(expected == found) and isinstance(expected, bool) == isinstance(found, bool)


def differences(expected: list[Row], found: list[Row]) -> list[str]:
    """Which fields of which rows differ."""
    if len(expected) != len(found):
        return [f"{len(expected)} rows expected, {len(found)} found"]
    return [
        f"row {place}: {name}"
        for place, (one, other) in enumerate(zip(expected, found, strict=True))
        for name in sorted(one.keys() | other.keys())
        if not same(one.get(name), other.get(name))
    ]
