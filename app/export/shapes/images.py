"""A row's images for trainers: those that have a place for them get the bytes, the others are told how many are not in
the row.

An image is a URL, which for an inline one is a data URL: TRL's and verl's processors and `datasets` decode both.
"""

from __future__ import annotations

from app.domain.images import data_url
from app.export.columns import Columns
from app.export.row import Fields, Row, RowImage

LEFT_OUT: Columns = {"images_left_out": "int64"}


def of(row: Row) -> list[str] | None:
    """The URLs of the images of the row's messages, in their order; None without any, and where the export does not ask
    for bytes (`images=inline`)."""
    shown = row.images or ()
    if any(image.bytes is None and image.url is None for image in shown):
        return None
    return [_url_of(image) for image in shown] or None


def _url_of(image: RowImage) -> str:
    if image.bytes is None:
        assert image.url is not None
        return image.url
    return data_url(image.media_type or "", image.bytes)


def left_out(row: Row) -> Fields:
    """How many stored images the row's turns brought, if any."""
    return {"images_left_out": row.stored_images} if row.stored_images else {}
