"""Reads archives from object storage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from app.store.archives import parquet
from app.store.archives.format import ArchivedSession, Place, object_of
from workers.codec import CorruptContent

if TYPE_CHECKING:
    from app.store.packs.bucket import Bucket

T = TypeVar("T")


class ObjectGone(CorruptContent):
    """The object is not in the object storage."""


async def read_group(bucket: Bucket, place: Place) -> dict[str, ArchivedSession]:
    """The sessions of a row group by id. Raises PayloadsUnavailable; CorruptContent, also if the archive is not
    there."""
    decode = partial(parquet.decode_group, row_group=place.row_group)
    found = await read_object(bucket, object_of(place.archive), decode)
    return {one.session_id: one for one in found}


async def read_object(bucket: Bucket, name: str, function: Callable[[BinaryIO], T]) -> T:
    """Run `function` on an object as a file, on a thread. Raises as `read_group`."""
    return await asyncio.to_thread(_read, bucket, name, function)


def _read(bucket: Bucket, name: str, function: Callable[[BinaryIO], T]) -> T:
    try:
        with bucket.open(name) as file:
            return function(file)
    except FileNotFoundError as error:
        raise ObjectGone(f"{name} is not in the object storage") from error
