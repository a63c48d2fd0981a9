"""The types of a shape's columns, which typed containers need before the first row.

A column is one of

- `text`, `bytes`, `bool`, `int64`, `float64`: one value;
- `json`: any value, which may contain arrays; a container without such a type stores its JSON text;
- `[int32]`: a numpy array, or a list of numbers, of any type in `ITEMS`; `[text]` is a list of text;
- `[[int32]]`: an array of two dimensions, or a list of arrays of different lengths; likewise `[[[uint8]]]`;
- a mapping from names to columns: a map with those keys.

Any value may be None. An array of rows may be flat, with two dimensions where the column has three. A container with
one type per column casts an array to it, and refuses if that would change a value; flat rows become one layer there.
The other containers keep each array's own type. A row may omit a column (None) but must not add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Column: TypeAlias = "str | Mapping[str, Column]"

Columns = Mapping[str, Column]

ITEMS = frozenset(
    {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float32", "float64", "bool", "text"}
)
"""The item types of arrays."""


def depth(column: str) -> tuple[int, str]:
    """The number of dimensions and the item type: `[[int32]]` is (2, "int32"), `text` is (0, "text")."""
    dimensions = len(column) - len(column.lstrip("["))
    return dimensions, column[dimensions : len(column) - dimensions]
