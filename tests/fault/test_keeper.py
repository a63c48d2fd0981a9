"""`turnlog serve`: its keeper, server and spare are killed, and clients do what they always do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from helpers.kept_server import KeptServer
from helpers.pools import gone
from integration.stand import until, user

from ops.server import ServerDidNotStart
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

AGENTS = 4
TURNS = 8
KILLS = 3
LATENCY_S = 0.15
PATIENCE_S = 60.0


@pytest.fixture
def server(tmp_path: Path, sqlite_url: str, engine: SimulatorProcess) -> Iterator[KeptServer]:
    made = KeptServer(tmp_path, upstreams=[engine.base_url], database_url=sqlite_url).start()
    try:
        yield made
    finally:
        made.stop()


def processes(server: KeptServer) -> set[int]:
    """The keeper's children: who serves, and who waits."""
    return {int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()}


def spare(server: KeptServer) -> int:
    """Waited for: it starts once the server serves."""
    until(lambda: server.spare in processes(server), PATIENCE_S)
    assert server.spare is not None
    return server.spare


def kill(server: KeptServer) -> None:
    """The process that serves now, and not before it does."""
    before = len(server.started)
    os.kill(server.started[-1], signal.SIGKILL)
    until(lambda: len(server.started) > before, PATIENCE_S)


def is_at_work(server: KeptServer) -> bool:
    return bool(httpx.get(f"{server.base_url}/health", timeout=PATIENCE_S).json()["in_flight"])


def converse(server: KeptServer, session_id: str, said: list[str]) -> None:
    """An agent as anybody writes one: the client as it comes, no error handled. `said` gets what it is answered."""
    messages: list[Any] = []
    with openai.OpenAI(base_url=f"{server.base_url}/sessions/{session_id}/v1", api_key="unused") as client:
        for turn in range(TURNS):
            messages.append(user(f"Question {turn}"))
            reply = client.chat.completions.create(
                model="simulator", messages=messages, extra_body={"sim": {"latency_s": LATENCY_S}}
            )
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            said.append(reply.choices[0].message.content or "")


def test_agents_with_default_retries_outlive_kills_of_the_server(server: KeptServer) -> None:
    names = [f"agent-{number}" for number in range(AGENTS)]
    for name in names:
        assert httpx.post(f"{server.base_url}/sessions", json={"session_id": name}).status_code == 200
    answers: list[list[str]] = [[] for _ in names]
    with ThreadPoolExecutor(AGENTS) as threads:
        running = [threads.submit(converse, server, *one) for one in zip(names, answers, strict=True)]
        for number in range(1, 1 + KILLS):
            # None has a turn that two processes die over: a third would be more than the client's retries.
            until(lambda number=number: all(len(said) >= number for said in answers), PATIENCE_S)
            until(lambda: is_at_work(server), PATIENCE_S)
            kill(server)
        for one in running:
            one.result()
    assert len(set(server.started)) == KILLS + 1
    for name, said in zip(names, answers, strict=True):
        [row] = map(json.loads, httpx.get(f"{server.base_url}/export", params={"session_id": name}).text.splitlines())
        assert [one["content"] for one in row["messages"] if one["role"] == "assistant"] == said
        events = map(json.loads, httpx.get(f"{server.base_url}/sessions/{name}/events").text.splitlines())
        assert sum(event["type"] == "TurnCommitted" for event in events) == TURNS


def test_a_connection_made_while_nobody_serves_waits(server: KeptServer) -> None:
    """Also where the spare is not there yet: it was killed as well."""
    both = {server.started[-1], spare(server)}
    os.kill(server.pid, signal.SIGSTOP)  # nobody is started meanwhile
    try:
        for pid in both:
            os.kill(pid, signal.SIGKILL)
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as early:
            early.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            os.kill(server.pid, signal.SIGCONT)
            assert early.recv(15) == b"HTTP/1.1 200 OK"
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_the_spare_opens_no_store_and_is_replaced(server: KeptServer) -> None:
    waiting = spare(server)
    opened = {os.readlink(path) for path in Path(f"/proc/{waiting}/fd").iterdir()}
    assert not [path for path in opened if str(server.database_path) in path]
    os.kill(waiting, signal.SIGKILL)
    until(lambda: server.spare not in (None, waiting), PATIENCE_S)
    assert len(server.started) == 1
    assert server.answers()


def test_the_successor_says_whom_it_succeeds(server: KeptServer) -> None:
    first, second = server.started[-1], spare(server)
    kill(server)
    assert server.started == [first, second]
    [line] = [line for line in server.log_path.read_text().splitlines() if "takes over" in line]
    assert json.loads(line)["event"] == f"server process {first} was killed by SIGKILL; process {second} takes over"


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_nobody_outlives_the_keeper(server: KeptServer, number: signal.Signals) -> None:
    both = {server.started[-1], spare(server)}
    os.kill(server.pid, number)
    assert all(gone(pid, PATIENCE_S) for pid in both)
    code = server.wait()
    assert code == (0 if number == signal.SIGINT else -number)
    log = server.log_path.read_text()
    assert ("Application shutdown complete" in log) == (number != signal.SIGKILL)
    assert "Traceback" not in log
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", server.port))
    assert len(server.started) == 1, "nobody took over"


def test_a_spare_ends_with_a_keeper_that_has_not_heard_from_it(server: KeptServer) -> None:
    """What nobody has read makes the end of a connection a reset."""
    serving, first = server.started[-1], spare(server)
    os.kill(first, signal.SIGKILL)
    until(lambda: processes(server) - {serving, first}, PATIENCE_S)
    os.kill(server.pid, signal.SIGSTOP)
    [second] = processes(server) - {serving, first}
    until(lambda: server.spare == second, PATIENCE_S)
    os.kill(server.pid, signal.SIGKILL)
    assert [pid for pid in (serving, second) if not gone(pid, 10)] == []


def test_a_stop_waits_for_the_turn_in_flight(server: KeptServer) -> None:
    assert httpx.post(f"{server.base_url}/sessions", json={"session_id": "last"}).status_code == 200
    url = f"{server.base_url}/sessions/last/v1/chat/completions"
    body = {"messages": [user("One more")], "sim": {"latency_s": 1.0}}
    with ThreadPoolExecutor(1) as thread:
        turn = thread.submit(httpx.post, url, json=body, timeout=PATIENCE_S)
        until(lambda: is_at_work(server), PATIENCE_S)
        assert server.stop() == -signal.SIGTERM
        assert turn.result().status_code == 200


def test_what_cannot_start_ends_at_once(tmp_path: Path) -> None:
    """With its own line and exit code, and not for ever again."""
    made = KeptServer(tmp_path)  # not migrated
    with pytest.raises(ServerDidNotStart, match="the database is at revision none") as failure:
        made.start()
    assert str(failure.value).count("Waiting for application startup") == 1
    made.launch()
    assert made.wait() == 3


def test_a_port_that_is_taken_is_said_in_one_line(server: KeptServer, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    second = KeptServer(tmp_path / "second", port=server.port)
    second.launch()
    assert second.wait() == 1
    said = second.log_path.read_text()
    assert said == f"turnlog: cannot listen at 127.0.0.1:{server.port}: Address already in use\n"


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
