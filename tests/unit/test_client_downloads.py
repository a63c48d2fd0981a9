"""What the client reads from a server or an object storage is bounded, and an export that is whole is done."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import zstandard
from helpers.answering import Answer, Answering, Asked

from turnlog import AsyncTurnlog, NotTurnlog, Turnlog, Unreachable, fetch_payload
from turnlog.client import lines

ROWS = b"".join(json.dumps({"cursor": f"c{number}"}).encode() + b"\n" for number in range(3))
BOMB = b"\0" * (64 << 20)
ENOUGH = 32 << 20
"""Bytes: far more than a bounded reader takes, and half of what the bombs unpack to."""


@pytest.mark.parametrize("limit", [3, None])
def test_an_export_that_breaks_off_behind_its_last_row(limit: int | None) -> None:
    asked: list[str] = []

    def answer(request: Asked) -> Answer:
        asked.append(request.path)
        return Answer(ROWS, (("Content-Length", str(len(ROWS) + 1)),))

    async def rows(url: str) -> list[Any]:
        async with AsyncTurnlog(url) as client:
            return [row async for row in client.export(limit=3)]

    with Answering(answer) as server, Turnlog(server.base_url, retry_for_s=0) as client:
        if limit is None:
            with pytest.raises(Unreachable):
                list(client.export())
        else:
            assert len(list(client.export(limit=limit))) == len(asyncio.run(rows(server.base_url))) == limit
            assert asked == ["/export?shape=turnlog&limit=3"] * 2


def deflated(data: bytes) -> bytes:
    return zlib.compress(data)


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", deflated), ("zstd", zstandard.compress)]
)
@pytest.mark.parametrize("status", [200, 500])
def test_a_packed_reply_is_not_unpacked(encoding: str, pack: Callable[[bytes], bytes], status: int) -> None:
    body = pack(BOMB)
    asked: list[str | None] = []

    def answer(request: Asked) -> Answer:
        asked.append(request.header("accept-encoding"))
        return Answer(body, (("Content-Encoding", encoding),), status)

    with Answering(answer) as server, Turnlog(server.base_url, retry_for_s=0) as client:
        tracemalloc.start()
        try:
            for call in (client.checkpoints, lambda: list(client.export()), client.attach("s").samples):
                with pytest.raises(NotTurnlog, match=encoding):
                    call()
            assert tracemalloc.get_traced_memory()[1] < ENOUGH
        finally:
            tracemalloc.stop()
    assert asked == ["identity"] * 3


def test_a_reply_and_a_line_have_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("lines", "_sync.transport"):
        monkeypatch.setattr(f"turnlog.client.{module}.LARGEST", 1000)
    with Answering(lambda _: Answer(b" " * 1001)) as server, Turnlog(server.base_url) as client:
        for call in (client.checkpoints, lambda: list(client.export())):
            with pytest.raises(NotTurnlog, match="more than 1000 bytes"):
                call()
    assert list(lines.Lines().feed(b"{}\n" * 1000)) == [{}] * 1000


def links(url: str, raw: bytes) -> dict[str, Any]:
    """A payload of one chunk with one row."""
    digest = hashlib.sha256(raw).hexdigest()[:32]
    chunk = {"url": url, "start": 0, "rows": 1, "dtype": "u1", "size": len(raw), "hash": digest}
    return {"row_start": 0, "shape": [1, len(raw)], "chunks": [chunk]}


RAW = bytes(range(250)) * 4


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (zstandard.compress(BOMB), ()),
        (zstandard.ZstdCompressor(write_content_size=False).compress(BOMB), ()),
        (BOMB, ()),
        (zstandard.compress(zstandard.compress(RAW)), (("Content-Encoding", "zstd"),)),
        (gzip.compress(BOMB), (("Content-Encoding", "gzip"),)),
    ],
    ids=["declared", "undeclared", "endless", "encoded", "gzip"],
)
def test_an_object_is_read_up_to_its_chunks_size(body: bytes, headers: Any) -> None:
    with Answering(lambda _: Answer(body, headers)) as server:
        tracemalloc.start()
        try:
            with pytest.raises(NotTurnlog):
                fetch_payload(links(server.base_url, RAW))
            assert tracemalloc.get_traced_memory()[1] < ENOUGH
        finally:
            tracemalloc.stop()


def test_an_object_is_its_chunk() -> None:
    with Answering(lambda _: Answer(zstandard.compress(RAW), ())) as server:
        assert fetch_payload(links(server.base_url, RAW)).tobytes() == RAW
