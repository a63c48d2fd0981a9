"""`GET /health` at fixed intervals, each timed from the moment it was meant for, whether or not the last is answered.

A probe goes out on a connection that is free, or on a new one: a server that takes long is asked as often as one
that does not, and one that stops for a second is seen to by every probe that fell due within it.
"""

from __future__ import annotations

import argparse
import selectors
import socket
import time
from urllib.parse import urlsplit

import msgspec

from ops.bench import watch
from ops.bench.measure import percentile

MOST_LINES = 512
"""Connections; a probe that would need more has failed."""

END_S = 30.0
"""How long the last answers are waited for."""


class Probes(msgspec.Struct):
    """Seconds of each answer; `lateness`: of the prober itself, in sending."""

    latencies: list[float]
    lateness: list[float]
    failures: int
    first_in_line: bool

    def figures(self) -> dict[str, float | int]:
        """In milliseconds. The prober's own lateness is part of its latencies."""
        return {
            "probes": len(self.latencies),
            "health p50 ms": percentile(self.latencies, 50) * 1000,
            "health p95 ms": percentile(self.latencies, 95) * 1000,
            "health p99 ms": percentile(self.latencies, 99) * 1000,
            "health max ms": max(self.latencies, default=float("nan")) * 1000,
            "prober late p99 ms": percentile(self.lateness, 99) * 1000,
            "probes failed": self.failures,
        }


class Prober(watch.Watcher):
    """The process that probes `base_url` every `interval_ms`."""

    def __init__(self, base_url: str, interval_ms: float = 5.0) -> None:
        super().__init__("ops.bench.prober", "--base-url", base_url, "--interval-ms", str(interval_ms))

    def probes(self) -> Probes:
        """End it and take what it found. Raises WatcherFailed."""
        return msgspec.convert(self.report(), Probes)


class _Line:
    """One connection. `intended` is when the probe that it carries was due; `asked`: it carries one."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.intended = 0.0
        self.asked = False
        self._data = b""

    def send(self, request: bytes, intended: float) -> None:
        """Raises OSError."""
        self.intended, self._data = intended, b""
        self.socket.sendall(request)
        self.asked = True

    def answered(self) -> bool:
        """Read what there is; is it the whole of a 200? Raises OSError for anything else."""
        piece = self.socket.recv(65536)
        if not piece:
            raise ConnectionResetError
        self._data += piece
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found:
            return False
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if head[9:12] != b"200":
            raise OSError(head[:32])
        return len(body) >= int(fields[b"content-length"])


class _Probing:
    """All lines of one run."""

    def __init__(self, base_url: str, found: Probes) -> None:
        parts = urlsplit(base_url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._request = b"GET /health HTTP/1.1\r\nhost: %s:%d\r\n\r\n" % (self._address[0].encode(), self._address[1])
        self._found = found
        self._selector = selectors.SelectSelector()  # epoll rounds its wait up to milliseconds
        self._idle: list[_Line] = []
        self.busy = 0

    def send(self, intended: float) -> None:
        """The probe that was due at `intended`."""
        if not self._idle and self.busy >= MOST_LINES:
            self._found.failures += 1
            return
        try:
            line = self._idle.pop() if self._idle else self._connected()
        except OSError:
            self._found.failures += 1
            return
        try:
            line.send(self._request, intended)
        except OSError:
            self._found.failures += 1
            self._drop(line)
            return
        self.busy += 1
        self._found.lateness.append(time.perf_counter() - intended)

    def _connected(self) -> _Line:
        line = _Line(self._address)
        self._selector.register(line.socket, selectors.EVENT_READ, line)
        return line

    def receive(self, until: float) -> None:
        """Take answers until then."""
        while True:
            for key, _ in self._selector.select(max(until - time.perf_counter(), 0)):
                self._read(key.data)
            if time.perf_counter() >= until:
                return

    def _read(self, line: _Line) -> None:
        if not line.asked:  # the server ends a connection that had nothing to do for some seconds
            self._idle.remove(line)
            self._drop(line)
            return
        try:
            if not line.answered():
                return
            self._found.latencies.append(time.perf_counter() - line.intended)
            line.asked = False
            self._idle.append(line)
        except OSError:
            self._found.failures += 1
            self._drop(line)
        self.busy -= 1

    def _drop(self, line: _Line) -> None:
        self._selector.unregister(line.socket)
        line.socket.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.bench.prober", description=__doc__)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--interval-ms", type=float, required=True)
    arguments = parser.parse_args()
    interval = arguments.interval_ms / 1000
    found = Probes([], [], 0, watch.go_first())
    probing = _Probing(arguments.base_url, found)
    watch.begin()
    intended = time.perf_counter()
    while not watch.told_to_stop(0):
        probing.send(intended)
        intended += interval
        probing.receive(intended)
    end = time.perf_counter() + END_S
    while probing.busy and time.perf_counter() < end:
        probing.receive(time.perf_counter() + interval)
    found.failures += probing.busy
    watch.finish(msgspec.to_builtins(found))


if __name__ == "__main__":
    main()
