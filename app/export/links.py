"""Replay payloads as URLs: a reader fetches the rows from object storage itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pybase64

from app.domain.events import ChunkRef
from app.domain.session import Payload
from app.errors import InvalidRequest
from app.export.query import ExportQuery
from app.store.content import StoredSession
from app.store.ports import Database

SHAPE, FORMATS = "turnlog", ("ndjson", "msgpack", "parquet")
"""What has a place for them."""

SIGNED_AT_ONCE = 32

Links = Mapping[str, Any]
"""A payload as a row gives it: `row_start`, `shape` of its rows, and `chunks`, each with its first row, rows, dtype,
bytes and hash before compression, and either `url` or, for what is in the database, `frame` as base64."""


def require(database: Database, query: ExportQuery) -> None:
    """Raises InvalidRequest."""
    if query.format not in FORMATS or query.shape != SHAPE or query.routing != "newest":
        formats = ", ".join(FORMATS)
        raise InvalidRequest(f"replay=urls needs shape={SHAPE}, routing=newest and one of the formats {formats}")
    if database.bucket is None or database.bucket.is_folder:
        raise InvalidRequest("replay=urls needs a bucket: TURNLOG_PAYLOADS is not set, or names a folder")


async def sign(database: Database, sessions: Iterable[StoredSession], seconds: int) -> dict[str, str]:
    """A URL for each object that these sessions' chunks are in. Raises PayloadsUnavailable."""
    bucket = database.bucket
    assert bucket is not None, "not required before"
    names = [name for stored in sessions for name in stored.objects.values()]
    urls: list[str] = []
    for at in range(0, len(names), SIGNED_AT_ONCE):
        part = names[at : at + SIGNED_AT_ONCE]
        urls += await asyncio.gather(*(bucket.url_of(name, seconds) for name in part))
    return dict(zip(names, urls, strict=True))


def links(payload: Payload, needed: Sequence[ChunkRef], stored: StoredSession, stop: int) -> Links | None:
    """The rows [start, stop) of a payload; None if they are tombstoned."""
    chunks: list[dict[str, Any]] = []
    for ref in needed:
        described = {name: getattr(ref, name) for name in ("start", "rows", "dtype", "size", "hash")}
        name, frame = stored.objects.get(ref.key), stored.chunks.get(ref.key)
        if name is not None:
            chunks.append({**described, "url": stored.urls[name]})
        elif frame is not None:
            chunks.append({**described, "frame": pybase64.b64encode(frame).decode()})
        else:
            return None
    return {"row_start": payload.start, "shape": [max(stop - payload.start, 0), *payload.shape], "chunks": chunks}
