"""A row's images for trainers: those that have a place for them get the bytes, the others are told how many are not in
the row.

An item is spelled as `datasets` spells an image, which TRL and verl decode: `bytes`, or `path` for one by URL.
"""

from __future__ import annotations

from app.export.columns import Columns
from app.export.row import Fields, Row

LEFT_OUT: Columns = {"images_left_out": "int64"}


def of(row: Row) -> list[Fields] | None:
    """The images of the row's messages, in their order; None without any, and where the export does not ask for bytes
    (`images=inline`)."""
    shown = row.images or ()
    if any(image.bytes is None and image.url is None for image in shown):
        return None
    return [{"bytes": image.bytes, "path": image.url} for image in shown] or None


def left_out(row: Row) -> Fields:
    """How many stored images the row's turns brought, if any."""
    return {"images_left_out": row.stored_images} if row.stored_images else {}
