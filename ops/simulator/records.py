"""Records of the simulator: the requests it received, and counters."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pybase64

PROBES = frozenset({"/health", "/model_info", "/get_model_info", "/is_paused", "/weight_info"})
"""Routes that are called constantly. They are only counted, so that they displace no other request from the log."""


@dataclass(slots=True)
class ReceivedRequest:
    """One request as it arrived.

    ``number`` counts requests from 1 since the process started. ``arrived`` and ``answered`` are seconds of the host's
    monotonic clock, so they can be compared between engines. ``answered`` is when the last byte of the reply was passed
    to the socket; 0.0 before that, and if the client disconnected first.
    """

    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    number: int = 0
    arrived: float = field(default_factory=time.monotonic)
    answered: float = 0.0

    def summary(self) -> dict[str, Any]:
        """The path, headers, number, times, and the body's hash."""
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
        """The summary and the body, decoded if it is JSON, and as base64."""
        try:
            parsed = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            parsed = None
        return {**self.summary(), "body": parsed, "body_base64": pybase64.b64encode(self.body).decode()}


class RequestLog:
    """The last requests, bounded by number and bytes. ``probes`` counts the requests to each of PROBES."""

    def __init__(self, count: int, size: int) -> None:
        self._count = count
        self._size = size
        self._total = 0
        self._number = 0
        self._seen: deque[ReceivedRequest] = deque()
        self.probes: Counter[str] = Counter()

    def add(self, seen: ReceivedRequest) -> None:
        """Number and store ``seen``; drop the oldest requests over the bounds."""
        self._number += 1
        seen.number = self._number
        self._seen.append(seen)
        self._total += len(seen.body)
        while len(self._seen) > self._count or (self._total > self._size and len(self._seen) > 1):
            self._total -= len(self._seen.popleft().body)

    def last(self, count: int) -> list[ReceivedRequest]:
        """The newest ``count`` requests, oldest first."""
        return list(self._seen)[-count:] if count > 0 else []

    def clear(self) -> None:
        self._seen.clear()
        self.probes.clear()
        self._total = 0


@dataclass(slots=True)
class Counters:
    """Counters of generations since the last reset.

    ``prefix_hit_tokens`` is the part of ``prompt_tokens`` found in the prefix cache. ``sampled_tokens`` are those of
    finished generations.
    """

    started: int = 0
    finished: int = 0
    faulted: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    sampled_tokens: int = 0
