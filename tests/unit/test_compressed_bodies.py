"""Compressed request bodies: read within the limits of bodies, counted as they are unpacked."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
import zstandard

from app.api.limits import read_body
from app.errors import AppError, InvalidRequest, Overloaded, RequestTooLarge, UnsupportedEncoding
from app.request_memory import RequestMemory

pytestmark = pytest.mark.anyio

LIMIT = 4 << 20
TEXT = b'{"messages": []}' * 1000
BOMB = bytes(256 << 20)
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "deflate": zlib.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "ZSTD ": zstandard.ZstdCompressor(write_content_size=False).compress,
    "": bytes,
    " ": bytes,
    "identity": bytes,
}


async def read(encodings: list[str], data: bytes, memory: RequestMemory, step: int = 50_000) -> bytes | None:
    parts = [data[at : at + step] for at in range(0, len(data), step)] or [b""]
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1]["more_body"] = False

    async def receive() -> dict[str, object]:
        return messages.pop(0)

    with memory.reserve("s", "p") as reservation:
        body = await read_body(receive, [("content-encoding", one) for one in encodings], LIMIT, reservation)
        assert body is not None
        assert reservation.size == len(body)
        return body


@pytest.mark.parametrize("encoding", PACKED)
async def test_a_compressed_body_is_read_wherever_it_was_cut(encoding: str) -> None:
    data = PACKED[encoding](TEXT)
    for step in (7, 50_000):
        assert await read([encoding], data, RequestMemory(1 << 30), step) == TEXT
    assert await read(["", encoding], data, RequestMemory(1 << 30)) == TEXT


@pytest.mark.threat("decompression bomb from a client")
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd", "ZSTD "])
async def test_a_bomb_is_refused_by_what_it_unpacks_to(encoding: str) -> None:
    memory = RequestMemory(1 << 30)
    with pytest.raises(RequestTooLarge):
        await read([encoding], PACKED[encoding](BOMB), memory)
    assert memory.size == 0
    crowded = RequestMemory(LIMIT)
    with crowded.reserve() as other:
        other.grow(LIMIT // 2)
        with pytest.raises(Overloaded):
            await read([encoding], PACKED[encoding](bytes(LIMIT - 1)), crowded)


@pytest.mark.parametrize(
    ("encodings", "data", "error"),
    [
        (["gzip"], TEXT, InvalidRequest),
        (["zstd"], TEXT, InvalidRequest),
        (["gzip"], gzip.compress(TEXT, mtime=0)[:-1], InvalidRequest),
        (["zstd"], PACKED["zstd"](TEXT)[:-1], InvalidRequest),
        (["gzip"], gzip.compress(TEXT, mtime=0) + b"x", InvalidRequest),
        (["gzip"], b"", InvalidRequest),
        (["br"], TEXT, UnsupportedEncoding),
        (["gzip, zstd"], TEXT, UnsupportedEncoding),
        (["gzip", "zstd"], TEXT, UnsupportedEncoding),
        (["x" * 9999], TEXT, UnsupportedEncoding),
    ],
    ids=lambda value: len(value) if isinstance(value, bytes) else None,  # gzip's data hold the time
)
async def test_what_cannot_be_unpacked_is_refused(encodings: list[str], data: bytes, error: type[AppError]) -> None:
    memory = RequestMemory(1 << 30)
    with pytest.raises(error) as refused:
        await read(encodings, data, memory)
    assert type(refused.value) is error
    assert memory.size == 0
