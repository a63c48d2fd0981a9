"""What the simulator has seen: bodies and counters."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pybase64

PROBES = frozenset({"/health", "/model_info", "/get_model_info", "/is_paused"})
"""Routes that are asked all the time: they are counted, and push no other request out of the log."""


@dataclass(slots=True)
class Seen:
    """One request as it arrived.

    ``number`` counts from 1 in the order of arrival, since the process began. ``arrived`` and ``answered`` are of the
    host's monotonic clock, in seconds: they compare between engines. ``answered`` is when the last byte of the reply
    was handed to the socket; 0.0 until then, and where the client left before.
    """

    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    number: int = 0
    arrived: float = field(default_factory=time.monotonic)
    answered: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Path, headers, order and the body's hash."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}
        return {
            "path": self.path,
            "headers": headers,
            "sha256": hashlib.sha256(self.body).hexdigest(),
            "number": self.number,
            "arrived": self.arrived,
            "answered": self.answered or None,
        }

    def whole(self) -> dict[str, Any]:
        """The summary and the body, parsed where it is JSON and to the byte."""
        try:
            parsed = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            parsed = None
        return {**self.summary(), "body": parsed, "body_base64": pybase64.b64encode(self.body).decode()}


class RequestLog:
    """The last bodies, bounded in number and bytes. ``probes`` counts the requests of each such route."""

    def __init__(self, count: int, size: int) -> None:
        self._count = count
        self._size = size
        self._total = 0
        self._number = 0
        self._seen: deque[Seen] = deque()
        self.probes: Counter[str] = Counter()

    def add(self, seen: Seen) -> None:
        """Keep and number ``seen``, drop the oldest past the bounds."""
        self._number += 1
        seen.number = self._number
        self._seen.append(seen)
        self._total += len(seen.body)
        while len(self._seen) > self._count or (self._total > self._size and len(self._seen) > 1):
            self._total -= len(self._seen.popleft().body)

    def last(self, count: int) -> list[Seen]:
        """The newest ``count``, oldest first."""
        return list(self._seen)[-count:] if count > 0 else []

    def clear(self) -> None:
        self._seen.clear()
        self.probes.clear()
        self._total = 0


@dataclass(slots=True)
class Counters:
    """Generations since the last reset. ``prefix_hit_tokens`` of all ``prompt_tokens`` were in the prefix cache.

    ``sampled_tokens`` are those of the generations that finished.
    """

    started: int = 0
    finished: int = 0
    faulted: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    sampled_tokens: int = 0
