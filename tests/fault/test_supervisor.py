"""`turnlog serve`: its supervisor and server are killed, and clients do what they always do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from helpers.pools import gone
from integration.stand import until, user

from ops.server import KeptServer
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

AGENTS = 4
TURNS = 8
KILLS = 3
PATIENCE_S = 60.0


@pytest.fixture
def server(tmp_path: Path, sqlite_url: str, engine: SimulatorProcess) -> Iterator[KeptServer]:
    made = KeptServer(tmp_path, upstreams=[engine.base_url], database_url=sqlite_url).start()
    try:
        yield made
    finally:
        made.stop()


def children(server: KeptServer) -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()}


def is_at_work(server: KeptServer) -> bool:
    return bool(httpx.get(f"{server.base_url}/health", timeout=PATIENCE_S).json()["in_flight"])


def test_a_killed_server_is_followed_by_another(server: KeptServer) -> None:
    """A connection that is made while nobody serves waits; one that dies before it serves is followed after a while."""
    first = server.started[-1]
    os.kill(server.pid, signal.SIGSTOP)  # nobody is started meanwhile
    try:
        os.kill(first, signal.SIGKILL)
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as early:
            early.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            os.kill(server.pid, signal.SIGCONT)
            assert early.recv(15) == b"HTTP/1.1 200 OK"
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert f"turnlog: server process {first} was killed by SIGKILL; starting another" in server.log_path.read_text()

    [serving] = children(server)
    os.kill(serving, signal.SIGKILL)
    for next_try in ("0.1", "0.2"):
        until(lambda: len(children(server) - {serving}) == 1, PATIENCE_S)
        [starting] = children(server)
        os.kill(starting, signal.SIGKILL)
        line = f"{starting} was killed by SIGKILL before it was ready; retrying in {next_try} s"
        until(lambda line=line: line in server.log_path.read_text(), PATIENCE_S)
    until(server.answers, PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nobody_outlives_the_supervisor(server: KeptServer, number: signal.Signals) -> None:
    serving = server.started[-1]
    if number == signal.SIGKILL:
        os.kill(serving, signal.SIGSTOP)  # also not where it does nothing itself
    os.kill(server.pid, number)
    assert gone(serving, PATIENCE_S)
    code = server.wait()
    assert code == (-number if number == signal.SIGKILL else 0)
    log = server.log_path.read_text()
    assert ("Application shutdown complete" in log) == (number != signal.SIGKILL)
    assert "Traceback" not in log
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", server.port))
    assert len(server.started) == 1


def test_a_taken_port_is_said_in_one_line_and_a_stop_waits_for_the_turn_in_flight(
    server: KeptServer, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    second = KeptServer(tmp_path / "second", port=server.port)
    second.launch()
    assert second.wait() == 1
    said = second.log_path.read_text()
    assert said == f"turnlog: cannot listen on 127.0.0.1:{server.port}: Address already in use\n"
    assert httpx.post(f"{server.base_url}/sessions", json={"session_id": "last"}).status_code == 200
    url = f"{server.base_url}/sessions/last/v1/chat/completions"
    body = {"messages": [user("One more")], "sim": {"latency_s": 1.0}}
    with ThreadPoolExecutor(1) as thread:
        turn = thread.submit(httpx.post, url, json=body, timeout=PATIENCE_S)
        until(lambda: is_at_work(server), PATIENCE_S)
        assert server.stop() == 0
        assert turn.result().status_code == 200


def test_what_cannot_start_ends_at_once(tmp_path: Path) -> None:
    """With its own line and exit code, and not for ever again."""
    made = KeptServer(tmp_path)  # not migrated
    made.launch()
    assert made.wait() == 3
    log = made.log_path.read_text()
    assert "the database is at revision none" in log
    assert log.count("Waiting for application startup") == 1


SOCKET_ACTIVATED = """
import os, socket, sys
made = socket.socket()
made.bind(("127.0.0.1", 0))
made.listen()
print(made.getsockname()[1], flush=True)
os.dup2(made.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES="turnlog.socket")
os.execv(sys.executable, [sys.executable, "-m", "turnlog.cli", "serve", "--port", "1"])
"""


def test_it_takes_systemds_socket(tmp_path: Path) -> None:
    """As systemd hands it over: descriptor 3, named in variables that are for this process alone."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SOCKET_ACTIVATED],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in (process.pid, *children):
            assert b"LISTEN_" not in Path(f"/proc/{child}/environ").read_bytes()
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert f"turnlog: {url}, the page at {url}/ui" in (tmp_path / "log").read_text()


def test_a_server_is_restarted_though_nobody_reads_the_log_any_more(tmp_path: Path, sqlite_url: str) -> None:
    command = [sys.executable, "-m", "turnlog.cli", "serve", "--no-migrate", "--port", "0"]
    environment = {**os.environ, "TURNLOG_DATABASE_URL": sqlite_url}
    process = subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        url = process.stderr.readline().split(",")[0].removeprefix("turnlog: ")
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
        process.stderr.close()
        [first] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGKILL)
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
