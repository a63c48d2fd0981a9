"""More connections than file descriptors: said, counted, and room is kept for whoever asks how the server is."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

FILES = 160
IDLE = FILES

OTHERS = (("/sessions", "GET"), ("/sessions/health", "GET"), ("/v1/metrics", "GET"), ("/health", "POST"))
"""What is not answered on the last descriptors."""


@pytest.fixture
def server(tmp_path: Path, engine: SimulatorProcess) -> Iterator[ServerProcess]:
    made = ServerProcess(tmp_path, upstreams=[engine.base_url], max_files=FILES)
    with made:
        yield made


@contextlib.contextmanager
def idle_connections(port: int) -> Iterator[list[socket.socket]]:
    """So many that the server has no descriptor left for another one."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(IDLE)]


def asked(port: int, path: str, method: str = "GET") -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        headers = "Host: localhost\r\nConnection: close\r\nContent-Length: 0"
        connection.sendall(f"{method} {path} HTTP/1.1\r\n{headers}\r\n\r\n".encode())
        came = b""
        while piece := connection.recv(1 << 16):
            came += piece
        return came


@pytest.mark.threat("idle connections use up file descriptors")
def test_who_finds_no_descriptor_is_told_and_the_last_are_kept(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.base_url, timeout=20) as known:
        session = known.post("/sessions").json()["session_id"]
        with idle_connections(server.port) as connections:
            told = [one.recv(1 << 16) for one in connections[-20:-15]]
            assert all(one.startswith(b"HTTP/1.1 503") and b"retry-after" in one for one in told), told
            assert asked(server.port, "/health").startswith(b"HTTP/1.1 200")
            metrics = asked(server.port, "/metrics").decode()
            assert metrics.startswith("HTTP/1.1 200")
            assert asked(server.port, "/health", "HEAD").startswith(b"HTTP/1.1 200")
            assert b'"checks"' in asked(server.port, "/ready?from=probe")
            for path, method in OTHERS:
                refused = asked(server.port, path, method)
                assert refused.startswith(b"HTTP/1.1 503"), path
                assert b'"overloaded"' in refused
            body = {"messages": [{"role": "user", "content": "Hello"}]}
            assert known.post(f"/sessions/{session}/v1/chat/completions", json=body).status_code == 200
        counted = re.search(r"^turnlog_connections_refused_total (\S+)$", metrics, re.MULTILINE)
        assert counted is not None
        assert float(counted[1]) >= 5
        log = server.log_path.read_text()
        assert log.count("out of file descriptors") == 1
        assert known.get("/sessions").status_code == 200
        assert "200 OK" in asked(server.port, "/sessions", "POST").decode("latin-1")
