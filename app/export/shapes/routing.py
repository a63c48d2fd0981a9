"""Replay payloads for trainers that want a row for every token but the last."""

from __future__ import annotations

import msgspec
import numpy as np

from app.domain.samples import Array
from app.export.row import Row
from workers.sampling_masks import Masks


def whole(row: Row, kind: str, largest: int = np.iinfo(np.int32).max) -> tuple[Array | None, str | None]:
    """All rows of a payload, ids of [T-1, layers, k], or None and why. Never padded.

    Where neither the engine nor the settings tell the shape of a row, rows are flat: [T-1, layers × k]. None and no
    reason where the session had no such payload, or the export does not ask for payloads. `largest` is the greatest id
    that the trainer can hold.
    """
    if kind not in row.routing:
        return None, None
    routing = row.routing[kind]
    if routing is None:
        return None, "tombstoned"
    needed = max(len(row.sample.tokens) - 1, 0)
    ids = routing.ids
    if routing.row_start or len(ids) != needed:
        return None, f"rows {routing.row_start} to {routing.row_start + len(ids)} are there; expected {needed}"
    if ids.size and ids.max() > largest:
        return None, f"an id exceeds {largest}"
    return ids, None


def whole_mask(row: Row, first: int) -> tuple[Masks | None, str | None]:
    """The sampling mask of the tokens from `first` on, which may be 0, or None and why.

    None and no reason where the session had none, or the export does not ask for payloads.
    """
    if row.mask is msgspec.UNSET:
        return None, None
    if row.mask is None:
        return None, "tombstoned"
    start, rows = row.mask.row_start, len(row.mask.masks)
    tokens = len(row.sample.tokens)
    if start > max(first - 1, 0) or start + rows < tokens - 1:
        return None, f"rows {start} to {start + rows} are there; expected {max(first - 1, 0)} to {tokens - 1}"
    mask = row.mask.masks.part(max(first - 1, 0) - start, tokens - 1 - start)
    return mask if first else Masks.of(np.append(0, mask.lengths), mask.ids), None
