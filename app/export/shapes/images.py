"""A row's images for trainers: those that have a place for them get the bytes, the others are told how many are not in
the row.

An image is a URL, which for an inline one is a data URL: TRL's and verl's processors and `datasets` decode both.
"""

from __future__ import annotations

from collections.abc import Callable

from app.domain.images import data_url
from app.export.row import Columns, Fields, Row, RowImage

LEFT_OUT: Columns = {"images_left_out": "int64"}


def placed(row: Row, place: Callable[[list[str]], Fields]) -> Fields:
    """What `place` makes of the URLs of the images of the row's messages, in their order. Without images nothing; where
    the export does not ask for bytes (`images=inline`), how many are left out."""
    shown = row.images or ()
    if row.stored_images and all(image.bytes is None for image in shown):
        return left_out(row)
    return place([_url_of(image) for image in shown]) if shown else {}


def _url_of(image: RowImage) -> str:
    if image.bytes is None:
        assert image.url is not None
        return image.url
    return data_url(image.media_type or "", image.bytes)


def left_out(row: Row) -> Fields:
    """How many stored images the row's turns brought, if any."""
    return {"images_left_out": row.stored_images} if row.stored_images else {}
