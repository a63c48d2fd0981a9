"""The batch scripts of `ops/deploy/slurm` as they stand, without Slurm: its commands are programs that write down how
they are called."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.guarded import bearer
from integration.places import Places
from integration.stand import until
from ops.server import ROOT, reserve_port

SCRIPTS = ROOT / "ops" / "deploy" / "slurm"
NODE = subprocess.run(["hostname", "-f"], capture_output=True, text=True, check=True).stdout.strip()
END_S = 120


class Cluster:
    """A folder on "shared storage", and jobs. `squeue` lists the job 41 alone."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.home, self.commands = folder / "home", folder / "bin"
        self.jobs: list[subprocess.Popen[bytes]] = []
        self.port, self.engine_port = reserve_port(self), reserve_port(self)
        self.commands.mkdir()
        for name, body in (
            ("squeue", '[ "$3" != 41 ] || echo running'),
            ("scontrol", f'echo "$@" >> {folder}/scontrol'),
        ):
            program = self.commands / name
            program.write_text(f"#!/bin/sh\n{body}\n")
            program.chmod(0o755)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")},
            "PATH": os.pathsep.join((str(self.commands), str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": str(ROOT),
            "TURNLOG_HOME": str(self.home),
            "TURNLOG_PORT": str(self.port),
            "TURNLOG_WORKERS": "1",
            "TURNLOG_DATABASE_URL": database_url,
            "ENGINE_PORT": str(self.engine_port),
        }

    def start(self, script: str, *arguments: str, job: int, **environment: str) -> subprocess.Popen[bytes]:
        made = subprocess.Popen(
            ["bash", SCRIPTS / script, *arguments],
            env={**self._environment, "SLURM_JOB_ID": str(job), **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.jobs.append(made)
        return made

    def http(self) -> httpx.Client:
        until(lambda: (self.home / "url").exists(), END_S)
        url = (self.home / "url").read_text().strip()
        assert url == f"http://{NODE}:{self.port}"
        return httpx.Client(base_url=url, headers=bearer((self.home / "token").read_text()), timeout=60)


@pytest.fixture
def cluster(places: Places, tmp_path: Path) -> Iterator[Cluster]:
    with places.new("slurm").database() as url:
        made = Cluster(tmp_path, url)
        yield made
        for job in reversed(made.jobs):
            if job.poll() is None:
                job.send_signal(signal.SIGTERM)
            job.communicate(timeout=END_S)


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.iterdir()))
def test_a_script_is_one_of_bash(script: str) -> None:
    subprocess.run(["bash", "-n", SCRIPTS / script], check=True)
    lines = (SCRIPTS / script).read_text().splitlines()
    first = next(number for number, line in enumerate(lines[1:], 1) if not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert options, "Slurm reads them before the first command"
    assert max(options) < first


def test_a_server_its_engine_and_what_is_left_of_them(cluster: Cluster, tmp_path: Path) -> None:
    server = cluster.start("server.sbatch", job=7)
    engine = cluster.start(
        *("engine.sbatch", "turnlog", "simulator", "--host", "0.0.0.0", "--port", str(cluster.engine_port)), job=8
    )
    with cluster.http() as http:

        def engines() -> list[Any]:
            found: list[Any] = http.get("/engines").json()["engines"]
            return [one["url"] for one in found]

        assert httpx.get(http.base_url.join("/sessions"), timeout=60).status_code in (401, 403), "it wants its token"
        until(lambda: engines() == [f"http://{NODE}:{cluster.engine_port}"], END_S)
        made = http.post("/sessions", json={}).json()["session_id"]
        body = {"model": "simulator", "messages": [{"role": "user", "content": "Hello"}]}
        assert http.post(f"/sessions/{made}/v1/chat/completions", json=body).status_code == 200
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(END_S) == 0
        assert engines() == []
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{cluster.engine_port}/health")
        server.send_signal(signal.SIGUSR1)
        assert server.wait(END_S) == 0
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"
    assert not (cluster.home / "url").exists()
    assert not (cluster.home / "holder").exists()
    again = cluster.start("server.sbatch", job=7)
    with cluster.http() as http:
        assert http.get(f"/sessions/{made}").json()["records"], "the token and the sessions are as they were"
    again.send_signal(signal.SIGTERM)
    assert again.wait(END_S) == 0
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n", "who ends it does not want it back"


@pytest.mark.parametrize(
    ("holder", "code"), [("41 other-node", 1), ("none other-node", 1), ("40 other-node", 0), ("9 other-node", 0)]
)
def test_what_another_node_may_have_is_left_alone(cluster: Cluster, holder: str, code: int) -> None:
    """Unless its job is not in the queue any more, or is this one, queued again."""
    cluster.home.mkdir()
    (cluster.home / "holder").write_text(f"{holder}\n")
    job = cluster.start("server.sbatch", job=9)
    if code == 0:
        cluster.http().close()
        job.send_signal(signal.SIGTERM)
    _, complaint = job.communicate(timeout=END_S)
    assert job.returncode == code
    assert (b"other-node has" in complaint) == bool(code)
