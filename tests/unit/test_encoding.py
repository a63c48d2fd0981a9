"""Compressed replies, unpacked piece by piece."""

from __future__ import annotations

import gzip
import zlib

import pytest
import zstandard

from app.upstream.encoding import Undecodable, decoder

BODY = b'{"id":"chatcmpl-1"}' * 1000
ZSTD = zstandard.ZstdCompressor().compress(BODY)
GZIP = gzip.compress(BODY, mtime=0)
BOMB = bytes(64 << 20)


def unpacked(encoding: str, data: bytes, step: int) -> bytes:
    unpack = decoder(encoding)
    assert unpack is not None
    pieces = [piece for at in range(0, len(data), step) for piece in unpack.feed(data[at : at + step])]
    unpack.finish()
    return b"".join(pieces)


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("encoding", "data"), [("gzip", GZIP), ("X-GZIP ", GZIP), ("deflate", zlib.compress(BODY)), ("zstd", ZSTD)]
)
def test_a_body_is_unpacked_wherever_it_was_cut(encoding: str, data: bytes, step: int) -> None:
    assert unpacked(encoding, data, step) == BODY


@pytest.mark.parametrize("encoding", ["", "identity", "Identity"])
def test_a_plain_body_needs_no_decoder(encoding: str) -> None:
    assert decoder(encoding) is None


@pytest.mark.threat("decompression bomb from an engine")
@pytest.mark.parametrize(
    ("encoding", "data", "largest"),
    [
        ("gzip", gzip.compress(BOMB, mtime=0), 1 << 20),
        ("zstd", zstandard.ZstdCompressor().compress(BOMB), 8 << 20),
        ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress(BOMB), 8 << 20),
    ],
)
def test_little_data_never_become_a_large_piece(encoding: str, data: bytes, largest: int) -> None:
    unpack = decoder(encoding)
    assert unpack is not None
    assert max(map(len, unpack.feed(data))) <= largest


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", BODY),
        ("zstd", BODY),
        ("gzip", GZIP[:-1]),
        ("zstd", ZSTD[:-1]),
        ("gzip", GZIP + b"x"),
        ("zstd", ZSTD + b"x"),
        ("gzip", b""),
        (
            "zstd",
            zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=27)).compress(
                BOMB
            ),
        ),
    ],
)
def test_what_is_no_whole_body_is_refused(encoding: str, data: bytes) -> None:
    with pytest.raises(Undecodable):
        unpacked(encoding, data, 1 << 20)


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "gzip,zstd"])
def test_an_unknown_encoding_is_named(encoding: str) -> None:
    with pytest.raises(Undecodable, match=encoding):
        decoder(encoding)
