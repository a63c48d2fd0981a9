"""Requests as they arrived, and generations in flight: their duration, pauses, aborts and disconnected clients."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pybase64

HungUp = Callable[[], Awaitable[None]]
"""Returns when the client of a request has left."""


@dataclass(slots=True)
class Run:
    """One generation in flight. Times are in seconds."""

    rid: str
    external_id: str  # vLLM's name of it, by which `/abort_requests` finds it
    duration: float  # of its tokens
    versions: list[tuple[float, str]]  # the share that was done, and the weight version from there on
    prefill: float = 0.0  # before its first token
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = 0.0
    aborted: bool = False
    retracted: bool = False  # taken back into the waiting queue
    queued: bool = False  # aborted there
    gone: bool = False  # the client disconnected

    def progress(self, now: float) -> float:
        """The share of the generation that is done, in [0, 1]."""
        if not self.began:
            return 0.0
        spent = now - self.began - self.prefill
        if self.duration <= 0:
            return 1.0 if spent >= 0 else 0.0
        return min(1.0, max(0.0, spent / self.duration))


class Runs:
    """The generations in flight, and the pause gate before and after them."""

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.aborted = 0
        self.disconnected = 0

    @property
    def paused(self) -> bool:
        return not self._resumed.is_set()

    @property
    def rids(self) -> list[str]:
        return [run.rid for run in self._runs.values()]

    def abort(self, rid: str, everything: bool) -> int:
        """Abort the generations whose request id begins with ``rid``; returns their number."""
        found = [run for run in self._runs.values() if everything or (rid and run.rid.startswith(rid))]
        for run in found:
            run.aborted = True
            run.queued = not run.began or run.retracted
            run.wake.set()
        return len(found)

    def abort_external(self, request_ids: Collection[str]) -> None:
        """Abort the generations with these ids, as vLLM spells them; unknown ids are ignored."""
        for run in self._runs.values():
            if run.external_id in request_ids:
                run.aborted = True
                run.wake.set()

    def new_version(self, version: str) -> None:
        """Continue the generations in flight under another weight version."""
        now = asyncio.get_running_loop().time()
        for run in self._runs.values():
            run.versions.append((run.progress(now), version))

    def pause(self, retract: bool = False) -> None:
        self._resumed.clear()
        for run in self._runs.values():
            run.retracted = retract

    def resume(self) -> None:
        self._resumed.set()
        for run in self._runs.values():
            run.retracted = False

    async def resumed(self) -> None:
        await self._resumed.wait()

    async def drained(self) -> None:
        await self._idle.wait()

    async def hold(self, run: Run, hung_up: HungUp) -> float:
        """Wait for the duration of ``run``; returns the share of it that was generated.

        Returns at once if the duration is 0, so that a benchmark needs no task for it.
        """
        if run.prefill + run.duration <= 0 and not self.paused:
            return 1.0
        self._runs[id(run)] = run
        self._idle.clear()
        watcher = asyncio.create_task(self._watch(run, hung_up))
        try:
            share = await self._wait(run)
        finally:
            del self._runs[id(run)]
            if not self._runs:
                self._idle.set()
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        self.aborted += run.aborted and not run.gone
        self.disconnected += run.gone
        return share

    @staticmethod
    async def _watch(run: Run, hung_up: HungUp) -> None:
        await hung_up()
        run.gone = run.aborted = True
        run.wake.set()

    async def _wait(self, run: Run) -> float:
        loop = asyncio.get_running_loop()
        await self._until_resumed(run)
        if run.aborted:
            return 0.0
        run.began = loop.time()
        takes = run.prefill + run.duration
        if not run.aborted and takes > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(run.wake.wait(), takes)
        share = run.progress(loop.time()) if run.aborted else 1.0
        await self._until_resumed(run)
        return share

    async def _until_resumed(self, run: Run) -> None:
        while self.paused and not run.aborted:
            gate = asyncio.ensure_future(self._resumed.wait())
            stop = asyncio.ensure_future(run.wake.wait())
            _, late = await asyncio.wait({gate, stop}, return_when=asyncio.FIRST_COMPLETED)
            for task in late:
                task.cancel()


PROBES = frozenset({"/health", "/model_info", "/get_model_info", "/is_paused", "/weight_info"})
"""Routes that are called constantly."""

_KEPT_BYTES = 64 * 2**20


@dataclass(slots=True)
class ReceivedRequest:
    """One request as it arrived. Times are seconds of the host's monotonic clock, so they can be compared between
    engines."""

    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    number: int = 0  # counts requests from 1 since the process started
    arrived: float = field(default_factory=time.monotonic)
    answered: float = 0.0  # when the last byte was passed to the socket; 0.0 before, and if the client left first

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

    def __init__(self, count: int) -> None:
        self._count = count
        self._total = 0
        self._number = 0
        self._seen: deque[ReceivedRequest] = deque()
        self.probes: Counter[str] = Counter()

    def add(self, seen: ReceivedRequest) -> None:
        """Number and store ``seen``; drop the oldest requests over the bounds. A probe is only counted, so that it
        displaces no other request."""
        if seen.path in PROBES:
            self.probes[seen.path] += 1
            return
        self._number += 1
        seen.number = self._number
        self._seen.append(seen)
        self._total += len(seen.body)
        while len(self._seen) > self._count or (self._total > _KEPT_BYTES and len(self._seen) > 1):
            self._total -= len(self._seen.popleft().body)

    def last(self, count: int) -> list[ReceivedRequest]:
        """The newest ``count`` requests, oldest first."""
        return list(self._seen)[-count:] if count > 0 else []

    def clear(self) -> None:
        self._seen.clear()
        self.probes.clear()
        self._total = 0
