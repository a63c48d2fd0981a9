"""An advantage for each token, for trainers that have a field for it."""

from __future__ import annotations

import numpy as np

from app.domain.samples import Array
from app.export.row import Row, Unfit

COLUMN = "advantages"


def by_token(row: Row) -> Array | None:
    """float [T], 0.0 outside the loss: the column `advantages` if the export asks for it, else the row's advantage.

    None without either. Raises Unfit where the column has no value at a token in the loss.
    """
    mask = row.sample.loss_mask
    if row.columns is None or COLUMN not in row.columns:
        return None if row.advantage is None else np.where(mask, row.advantage, 0.0)
    column = row.columns[COLUMN]
    lacking = int(np.count_nonzero(mask if column is None else mask > column.mask))
    if lacking:
        raise Unfit(f"the column {COLUMN} has no value at {lacking} tokens in the loss")
    return np.zeros(len(mask)) if column is None else np.where(mask, column.values, 0.0)
