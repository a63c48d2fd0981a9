"""Replay payloads for trainers that want a row for every token but the last."""

from __future__ import annotations

import numpy as np

from app.domain.samples import Array
from app.export.row import Row


def whole(row: Row, kind: str, largest: int = np.iinfo(np.int32).max) -> tuple[Array | None, str | None]:
    """All rows of a payload, ids of [T-1, layers, k], or None and why. Never padded.

    Where neither the engine nor the settings tell the shape of a row, rows are flat: [T-1, layers × k]. None and no
    reason where the session had no such payload, or the export does not ask for payloads. `largest` is the greatest id
    that the trainer can hold.
    """
    if kind not in row.routing:
        return None, None
    found = row.routing[kind]
    if found is None:
        return None, "tombstoned"
    needed = max(len(row.sample.tokens) - 1, 0)
    ids = found.ids
    if found.row_start or len(ids) != needed:
        return None, f"rows {found.row_start} to {found.row_start + len(ids)} are there, {needed} are needed"
    if ids.size and ids.max() > largest:
        return None, f"an id exceeds {largest}"
    return ids, None
