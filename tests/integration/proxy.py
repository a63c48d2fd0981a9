"""A proxy that records what passes through it, and says things that only its own connection may say."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import httpx
import zstandard
from helpers.answering import Answer, Answering, Asked, Pairs

OWN_HEADERS = (
    ("Server", "engine/1"),
    ("Date", "Thu, 01 Jan 1970 00:00:00 GMT"),
    ("X-Engine-Id", "seven"),
    ("X-Request-Id", "of-the-engine"),
    ("Connection", "keep-alive, X-Hop"),
    ("X-Hop", "one"),
    ("Keep-Alive", "timeout=5"),
    ("Proxy-Authenticate", "Basic"),
    ("Set-Cookie", "engine=1"),
)
PASSED = ("content-type", "retry-after", "location")
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


class RecordingProxy(Answering):
    """Forwards to `target`, or where the client of a proxy wants to go; keeps requests' headers and replies' bytes.

    Before an engine only what is posted is recorded.
    """

    def __init__(self, target: str) -> None:
        super().__init__(self._forwarded)
        self.requests: list[Pairs] = []
        self.paths: list[str] = []
        self.replies: list[bytes] = []
        self.encoding: str | None = None
        self._target = target

    def _forwarded(self, asked: Asked) -> Answer:
        is_proxied = asked.path.startswith("http://")
        is_recorded = asked.method == "POST" or is_proxied
        if is_recorded:
            self.requests.append(asked.headers)
            self.paths.append(asked.path)
        url = asked.path if is_proxied else self._target + asked.path
        kept = {"content-type": asked.header("content-type") or "application/json"}
        with httpx.Client(trust_env=False, timeout=20) as client:
            reply = client.request(asked.method, url, content=asked.body, headers=kept)
        if is_recorded:
            self.replies.append(reply.content)
        passed = [(name, reply.headers[name]) for name in PASSED if name in reply.headers]
        if self.encoding is not None:
            packed = PACKED[self.encoding](reply.content)
            return Answer(packed, [*OWN_HEADERS, *passed, ("Content-Encoding", self.encoding)], reply.status_code)
        return Answer(reply.content, [*OWN_HEADERS, *passed], reply.status_code)
