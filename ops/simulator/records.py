"""What the simulator has seen: bodies, counters, and served prefixes."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pybase64

from ops.simulator.lru import Lru


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as it arrived."""

    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def summary(self) -> dict[str, Any]:
        """Path, headers and the body's hash."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}
        return {"path": self.path, "headers": headers, "sha256": hashlib.sha256(self.body).hexdigest()}

    def whole(self) -> dict[str, Any]:
        """The summary and the body, parsed where it is JSON and to the byte."""
        try:
            parsed = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            parsed = None
        return {**self.summary(), "body": parsed, "body_base64": pybase64.b64encode(self.body).decode()}


class RequestLog:
    """The last bodies, bounded in number and bytes."""

    def __init__(self, count: int, size: int) -> None:
        self._count = count
        self._size = size
        self._total = 0
        self._seen: deque[Seen] = deque()

    def add(self, seen: Seen) -> None:
        """Keep ``seen``, drop the oldest past the bounds."""
        self._seen.append(seen)
        self._total += len(seen.body)
        while len(self._seen) > self._count or (self._total > self._size and len(self._seen) > 1):
            self._total -= len(self._seen.popleft().body)

    def last(self, count: int) -> list[Seen]:
        """The newest ``count``, oldest first."""
        return list(self._seen)[-count:] if count > 0 else []

    def clear(self) -> None:
        """Forget all of them."""
        self._seen.clear()
        self._total = 0


@dataclass(slots=True)
class Counters:
    """Generations since the last reset."""

    started: int = 0
    finished: int = 0
    faulted: int = 0
    refused: int = 0


def _shared_ids(one: bytes, other: bytes) -> int:
    """Length of the common prefix of two packed sequences, in ids."""
    count = min(len(one), len(other)) // 4
    differ = np.frombuffer(one, np.int32, count) != np.frombuffer(other, np.int32, count)
    return int(differ.argmax()) if differ.any() else count


@dataclass(slots=True)
class PrefixCache:
    """The newest sequence served under each routing key, as packed ids."""

    _served: Lru[str, bytes] = field(default_factory=lambda: Lru[str, bytes](256 * 2**20))

    def cached(self, key: str, prompt: bytes) -> int:
        """How many leading ids of ``prompt`` were served before; never all."""
        old = self._served.get(key)
        if not old or not prompt:
            return 0
        shared = len(old) // 4 if prompt.startswith(old) else _shared_ids(old, prompt)
        return min(shared, len(prompt) // 4 - 1)

    def served(self, key: str, prompt: bytes, sampled: bytes) -> None:
        """Remember a sequence."""
        self._served.put(key, prompt + sampled, len(prompt) + len(sampled) + 200)

    def clear(self) -> None:
        """Flush."""
        self._served.clear()
