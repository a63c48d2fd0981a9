"""Errors that an engine compressed."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest

from app.upstream.body import Body
from app.upstream.client import EngineReply
from app.upstream.encoding import LIMIT, plain_error

BODY = b'{"object":"error","message":"slow down"}'
PACKED = gzip.compress(BODY, mtime=0)


def error(encoding: str, data: bytes) -> EngineReply:
    headers = [("Retry-After", "17"), ("Content-Type", "text/plain"), ("Content-Encoding", encoding)]
    return plain_error(EngineReply(429, headers, Body([data[:9], data[9:]] if len(data) > 9 else [data])))


@pytest.mark.parametrize(("encoding", "data"), [("gzip", PACKED), ("X-GZIP", PACKED), ("deflate", zlib.compress(BODY))])
def test_what_can_be_read_is_unpacked(encoding: str, data: bytes) -> None:
    reply = error(encoding, data)
    assert reply.body.joined() == BODY
    assert (reply.status, reply.headers) == (429, [("Retry-After", "17"), ("Content-Type", "text/plain")])


@pytest.mark.threat("decompression bomb from an engine")
@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("br", BODY),
        ("gzip", BODY),
        ("gzip", PACKED[:-1]),
        ("gzip", gzip.compress(b"", mtime=0)),
        ("gzip, gzip", gzip.compress(PACKED, mtime=0)),
        ("gzip", gzip.compress(bytes(LIMIT + 1), mtime=0)),
    ],
)
def test_what_cannot_be_read_keeps_its_status_and_when_to_come_again(encoding: str, data: bytes) -> None:
    reply = error(encoding, data)
    assert (reply.status, reply.headers) == (429, [("Retry-After", "17"), ("content-type", "application/json")])
    assert encoding in json.loads(reply.body.joined())["error"]["message"]
