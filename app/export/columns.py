"""What the columns of a shape hold: what a typed container needs to know before the first row, or with no row at all.

A column is one of

- `text`, `bytes`, `bool`, `int64`, `float64`: one value;
- `json`: any value, arrays inside it too, which a container without such a type holds as its JSON text;
- `[int32]`: a numpy array, or a list of numbers; any of `ITEMS` may stand in the brackets, `[text]` is a list of text;
- `[[int32]]`: an array of two dimensions, or a list of arrays of different lengths; and so on with `[[[uint8]]]`;
- a mapping from names to columns: a map with those keys.

Any value may be None. An array of rows may be flat, of two dimensions where the column has three. A container that has
one type a column casts an array to it, and refuses where that would change a value; flat rows are one layer there. The
other containers keep each array's own type. A row may lack a column (it is None) but not add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Column: TypeAlias = "str | Mapping[str, Column]"

Columns = Mapping[str, Column]

ITEMS = frozenset(
    {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float32", "float64", "bool", "text"}
)
"""What an array may hold."""


def depth(column: str) -> tuple[int, str]:
    """How many dimensions, and of what: `[[int32]]` is (2, "int32"), `text` is (0, "text")."""
    dimensions = len(column) - len(column.lstrip("["))
    return dimensions, column[dimensions : len(column) - dimensions]
