"""An export's rows as a frame of pandas or polars, or as a dataset of Hugging Face's `datasets`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    import polars as pl

Package = Literal["pandas", "polars", "datasets"]

Item = Literal["null", "bool", "int32", "int64", "float64", "string", "json"]


INT32 = range(-(2**31), 2**31)


@dataclass(frozen=True)
class Kind:
    """What a column holds: `depth` lists around the items. An item of `json` is any JSON value."""

    depth: int
    item: Item


def load(package: Package) -> Any:
    """The package. Raises ModuleNotFoundError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        method = "to_dataset" if package == "datasets" else f"to_{package}"
        raise ModuleNotFoundError(f"{method}() needs {package}: pip install {package}", name=package) from error


def to_pandas(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A list of numbers is a numpy array; an object is the dict that it was."""
    pandas = load("pandas")
    columns = {}
    for name, values in _columns(rows).items():
        kind = _kind(values)
        if kind.depth and kind.item in ("bool", "int32", "int64", "float64"):
            values = [_arrays(value, kind.depth, kind.item) for value in values]
        columns[name] = pandas.Series(values, dtype=object if kind.depth or kind.item == "json" else None)
    return pandas.DataFrame(columns)


def to_polars(rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """A list is a polars list; an object is JSON text."""
    polars = load("polars")
    types = {
        "null": polars.Null,
        "bool": polars.Boolean,
        "int32": polars.Int32,
        "int64": polars.Int64,
        "float64": polars.Float64,
        "string": polars.String,
        "json": polars.String,
    }
    columns = []
    for name, values in _columns(rows).items():
        kind = _kind(values)
        dtype = types[kind.item]
        for _ in range(kind.depth):
            dtype = polars.List(dtype)
        # not strict: a whole number among a column's floats is one of them
        columns.append(polars.Series(name, _written(values, kind), dtype=dtype, strict=False))
    return polars.DataFrame(columns)


def to_dataset(rows: Sequence[Mapping[str, Any]]) -> datasets.Dataset:
    """A list is a list; an object is JSON text, so that rows of any content are of one schema."""
    hub = load("datasets")
    columns, features = {}, {}
    for name, values in _columns(rows).items():
        kind = _kind(values)
        columns[name] = _written(values, kind)
        features[name] = hub.Value("string" if kind.item == "json" else kind.item)
        for _ in range(kind.depth):
            features[name] = hub.List(features[name])
    return hub.Dataset.from_dict(columns, features=hub.Features(features))


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The fields of all rows, in the order of their first appearance; None where a row lacks one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _kind(values: Sequence[Any]) -> Kind:
    """The narrowest kind that holds them all. Lists of integers are of int32 where that is wide enough."""
    leaves = _leaves(values)
    depths = {depth for depth, kind in leaves if kind is not NoneType}
    depth = max((depth for depth, _ in leaves), default=0)
    kinds = {kind for _, kind in leaves if kind is not NoneType}
    if len(depths) > 1 or (depths and depths != {depth}):
        return Kind(0, "json")
    if not kinds:
        return Kind(depth, "null")
    if kinds == {int}:
        return Kind(depth, "int32" if depth and _is_narrow(values, depth + 1) else "int64")
    if kinds <= {int, float}:
        return Kind(depth, "float64")
    if kinds == {bool} or kinds == {str}:
        return Kind(depth, "bool" if bool in kinds else "string")
    return Kind(0, "json")


def _leaves(values: Sequence[Any], depth: int = 0) -> set[tuple[int, type]]:
    """How deep in lists there are values of which types; also where nothing but None or an empty list is."""
    kinds = set(map(type, values))
    leaves = {(depth, kind) for kind in kinds or {NoneType} if kind is not list}
    if list in kinds:
        for value in values:
            if isinstance(value, list):
                leaves |= _leaves(value, depth + 1)
    return leaves


def _is_narrow(value: Any, depth: int) -> bool:
    if value is None:
        return True
    if depth > 1:
        return all(_is_narrow(one, depth - 1) for one in value)
    numbers = [number for number in value if number is not None]
    return not numbers or (min(numbers) in INT32 and max(numbers) in INT32)


def _arrays(value: Any, depth: int, item: Item) -> Any:
    """The innermost lists as arrays, but for one with a None in it."""
    if value is None or (depth == 1 and None in value):
        return value
    import numpy as np  # pandas has brought it

    return np.array(value, item) if depth == 1 else [_arrays(one, depth - 1, item) for one in value]


def _written(values: Sequence[Any], kind: Kind) -> Sequence[Any]:
    if kind.item != "json":
        return values
    return [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
