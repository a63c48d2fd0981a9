"""Unpacks compressed replies, which proxies before engines send unasked, piece by piece and within bounds."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

import zstandard

PIECE = 1 << 20
"""Largest unpacked piece in bytes, but for zstd (`_SLICE`)."""

_SLICE = 256
"""zstd is fed so many bytes at a time: they hold at most 64 blocks of 128 KiB (RFC 8878, section 3.1.1.2)."""

_ZSTD_WINDOW = 8 << 20
"""Largest window of zstd as a content encoding (RFC 9659)."""

_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32


MOST_TIMES, ANY_TIMES_BYTES = 100, 8 << 20
"""Past the second so many bytes, no more than the first times what was sent: logprobs and ids as JSON shrink 5 to 40
times, a bomb a thousand times."""


class Undecodable(Exception):
    """The content encoding is unknown, or the data are damaged or end too soon; the message says which."""


class Decoder(Protocol):
    def feed(self, data: bytes) -> Iterator[bytes]:
        """The unpacked data in pieces. Raises Undecodable."""

    def finish(self) -> None:
        """Raises Undecodable if the data have ended too soon."""


def decoder(encoding: str) -> Decoder | None:
    """For a `Content-Encoding`; None if nothing is encoded. Raises Undecodable for an unknown one."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name in ("gzip", "x-gzip", "deflate"):
        return _Zlib()
    if name == "zstd":
        return _Zstd()
    raise Undecodable(f"its content-encoding is {name:.32}")


def is_bomb(packed: int, plain: int) -> bool:
    """Do so few bytes unpack to so many only in order to fill memory?"""
    return plain > max(ANY_TIMES_BYTES, MOST_TIMES * packed)


class _Zlib:
    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_GZIP_OR_ZLIB)

    def feed(self, data: bytes) -> Iterator[bytes]:
        stream = self._stream
        try:
            while data and not stream.eof:
                yield stream.decompress(data, PIECE)
                data = stream.unconsumed_tail
        except zlib.error as error:
            raise Undecodable("its compressed data are damaged") from error
        if data or stream.unused_data:
            raise Undecodable("data follow its compressed data")

    def finish(self) -> None:
        if not self._stream.eof:
            raise Undecodable("its compressed data end too soon")


class _Zstd:
    def __init__(self) -> None:
        self._stream = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()

    def feed(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), _SLICE):
            if self._stream.eof:
                raise Undecodable("data follow its compressed data")
            try:
                yield self._stream.decompress(data[start : start + _SLICE])
            except zstandard.ZstdError as error:
                raise Undecodable("its compressed data are damaged") from error
        if self._stream.unused_data:
            raise Undecodable("data follow its compressed data")

    def finish(self) -> None:
        if not self._stream.eof:
            raise Undecodable("its compressed data end too soon")
