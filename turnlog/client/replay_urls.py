"""Replay payloads of rows that were exported with `replay=urls`, fetched from the object storage that they are in."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx

from turnlog.client.columns import require_numpy
from turnlog.client.lines import UNPACKED, require_unpacked
from turnlog.errors import NotTurnlog, Unreachable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

TIMEOUT_S = 60.0

LARGEST_CHUNK = 1 << 30
"""Bytes of a chunk: the server makes them of about 1 MiB, and of one row at least."""


def fetch_payload(links: Mapping[str, Any], http: httpx.Client | None = None) -> Array:
    """The rows of one payload, as `replay=true` gives them: ids of shape `links["shape"]`, in the smallest type that
    holds them. The first row is that of token `links["row_start"]`.

    Each chunk is one request, verified by its hash; no more is read and unpacked than its size. Needs zstandard:
    `turnlog[urls]`. Raises Unreachable, also for a URL that has expired (export the row again); NotTurnlog for bytes
    that are not the chunk's.
    """
    require_numpy("fetch_payload()")
    import numpy as np

    stop = links["row_start"] + links["shape"][0]
    with httpx.Client(timeout=TIMEOUT_S) if http is None else _Borrowed(http) as client:
        parts = [_rows(chunk, client)[: stop - chunk["start"]] for chunk in links["chunks"]]
    ids = np.concatenate(parts) if parts else np.zeros((0, 1), "u1")
    wanted = ids[max(links["row_start"] - links["chunks"][0]["start"], 0) :] if parts else ids
    return _smallest(wanted).reshape(links["shape"])


class _Borrowed:
    """A caller's client, which stays open."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def __enter__(self) -> httpx.Client:
        return self._http

    def __exit__(self, *raised: object) -> None: ...


def _rows(chunk: Mapping[str, Any], http: httpx.Client) -> Array:
    import numpy as np
    from zstandard import ZstdDecompressor, ZstdError, frame_content_size

    size = chunk["size"]
    if not 0 <= size <= LARGEST_CHUNK:
        raise NotTurnlog(f"a chunk of {size} bytes")
    frame = base64.b64decode(chunk["frame"]) if "frame" in chunk else _fetched(chunk, http)
    try:
        # `max_output_size` holds only for a frame that does not say its size.
        if frame_content_size(frame) != size:
            raise NotTurnlog(f"the chunk from row {chunk['start']} on does not have the expected size")
        raw = ZstdDecompressor().decompress(frame)
    except ZstdError as error:
        raise NotTurnlog(f"the chunk from row {chunk['start']} on cannot be decompressed") from error
    if hashlib.sha256(raw).hexdigest()[:32] != chunk["hash"]:
        raise NotTurnlog(f"the rows from {chunk['start']} on differ from those that were stored")
    return np.frombuffer(raw, np.dtype(chunk["dtype"]).newbyteorder("<")).reshape(chunk["rows"], -1)


def _fetched(chunk: Mapping[str, Any], http: httpx.Client) -> bytes:
    """The object's bytes: of a frame at most a little more than it unpacks to. Raises Unreachable, NotTurnlog."""
    most = chunk["size"] + (chunk["size"] >> 6) + 1024
    parts: list[bytes] = []
    size = 0
    try:
        with http.stream("GET", chunk["url"], headers=UNPACKED) as reply:
            if reply.status_code != httpx.codes.OK:
                raise Unreachable(f"the object storage answered {reply.status_code}: the URL may have expired")
            require_unpacked(reply.headers)
            for part in reply.iter_raw():
                size += len(part)
                if size > most:
                    raise NotTurnlog(f"the object with the rows from {chunk['start']} on is larger than expected")
                parts.append(part)
    except httpx.TransportError as error:
        raise Unreachable(f"the object storage does not answer: {type(error).__name__}") from error
    return b"".join(parts)


def _smallest(ids: Array) -> Array:
    if not ids.size:
        return ids
    import numpy as np

    most, least = int(ids.max()), int(ids.min())
    kind = next(kind for kind in ("u1", "u2", "i2", "i4") if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max)
    return ids.astype(kind, copy=False)
