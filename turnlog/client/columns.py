"""Columns of numbers, one a token, between numpy and the server's files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Column = np.ma.MaskedArray[Any, Any]

NPY = "application/x-npy"


def require_numpy(what: str) -> None:
    """Most clients and commands never need numpy. Raises ImportError with the command that installs it."""
    if find_spec("numpy") is None:
        raise ImportError(f"{what} needs the package numpy: pip install numpy")


def to_npy(values: ArrayLike) -> bytes:
    """An `.npy` file of numbers [T]: int32 of integers, else float32; of a masked array also its mask.

    Raises ValueError for what is no list of numbers, and for an integer that int32 does not hold.
    """
    require_numpy("a column")
    import numpy as np

    given: Column = np.ma.asarray(values)
    if given.ndim != 1 or given.dtype.kind not in "fiu":
        raise ValueError(f"a column is numbers of the shape (T,), not {given.dtype} of {given.shape}")
    dtype = "<f4" if given.dtype.kind == "f" else "<i4"
    numbers: NDArray[Any] = given.filled(0)
    written = numbers.astype(dtype)
    if dtype == "<i4" and not np.array_equal(written, numbers):
        raise ValueError("an integer of a column is too large for int32")
    mask = np.ma.getmaskarray(given)
    file = io.BytesIO()
    np.save(file, np.stack([written, (~mask).astype(dtype)]) if mask.any() else written)
    return file.getvalue()


def to_array(values: Sequence[float | None], dtype: str) -> Column:
    """Numbers [T] of that type, masked where there is None."""
    require_numpy("a column")
    import numpy as np

    mask = [value is None for value in values]
    return np.ma.MaskedArray(np.array([value or 0 for value in values], dtype), mask=mask)
