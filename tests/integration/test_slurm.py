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
from helpers.clusters import binaries, folder_of_server

from integration.guarded import bearer
from integration.places import Places
from integration.stand import until
from ops.server import ROOT, reserve_port

SCRIPTS = ROOT / "ops" / "deploy" / "slurm"
NODE = subprocess.run(["hostname", "-f"], capture_output=True, text=True, check=True).stdout.strip()
END_S = 120


class Cluster:
    """A folder on "shared storage", and jobs. `squeue` lists the job 41 alone; it fails if there is a file `no-squeue`.
    While a start waits for the heartbeat of another node, that beats if there is a file `lives`, once."""

    def __init__(self, folder: Path, database_url: str | None) -> None:
        self.folder, self.home, self.commands = folder, folder / "home", folder / "bin"
        self.jobs: list[subprocess.Popen[bytes]] = []
        self.port, self.engine_port = reserve_port(self), reserve_port(self)
        self.commands.mkdir()
        self.program("squeue", f"[ ! -e {folder}/no-squeue ] && echo 41")
        self.program("scontrol", f'echo "$@" >> {folder}/scontrol')
        beats = f"{{ rm {folder}/lives && echo more >> {self.home}/heartbeat; }}"
        self.program("sleep", f'[ "$1" = 60 ] || exec /bin/sleep "$1"; [ ! -e {folder}/lives ] || {beats}')
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")},
            "PATH": os.pathsep.join((str(self.commands), str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": str(ROOT),
            "TURNLOG_HOME": str(self.home),
            "TURNLOG_PORT": str(self.port),
            "TURNLOG_POSTGRES_PORT": str(reserve_port(self)),
            "TURNLOG_WORKERS": "1",
            "ENGINE_PORT": str(self.engine_port),
        }
        if database_url is not None:
            self._environment["TURNLOG_DATABASE_URL"] = database_url

    def program(self, name: str, body: str) -> None:
        program = self.commands / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)

    def start(self, script: str, *arguments: str, job: int | None, **environment: str) -> subprocess.Popen[bytes]:
        made = subprocess.Popen(
            ["bash", SCRIPTS / script, *arguments],
            env={**self._environment, **({} if job is None else {"SLURM_JOB_ID": str(job)}), **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.jobs.append(made)
        return made

    def http(self) -> httpx.Client:
        until(lambda: (self.home / "url").exists(), END_S)
        url = (self.home / "url").read_text().strip()
        assert url == f"http://{NODE}:{self.port}"
        return httpx.Client(base_url=url, headers=bearer((self.home / "token").read_text()), timeout=60)

    def end(self) -> None:
        for job in reversed(self.jobs):
            if job.poll() is None:
                job.send_signal(signal.SIGTERM)
            job.communicate(timeout=END_S)


@pytest.fixture
def cluster(places: Places, tmp_path: Path) -> Iterator[Cluster]:
    with places.new("slurm").database() as url:
        made = Cluster(tmp_path, url)
        yield made
        made.end()


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """Without a database: with PostgreSQL's programs, which run as another user where this one is root."""
    with folder_of_server() as folder:
        folder.chmod(0o755)
        made = Cluster(folder, None)
        programs, user = binaries()
        become = f"chown -R {user} {made.home}; cd /; exec setpriv --reuid={user} --regid={user} --clear-groups"
        for name in ("initdb", "pg_ctl"):
            made.program(name, f'{"exec" if user is None else become} {programs / name} "$@"')
        yield made
        made.end()
        subprocess.run([made.commands / "pg_ctl", "stop", "--mode=immediate", "-D", made.home / "postgres"])


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
        _, complaint = (second := cluster.start("server.sbatch", job=9)).communicate(timeout=END_S)
        assert second.returncode == 1, "one of a node is enough"
        assert b"already" in complaint
        assert (cluster.home / "url").exists()
        assert (cluster.home / "holder").read_text().startswith(f"7 {NODE} ")
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
    ("holder", "job", "there", "code"),
    [
        ("41 other-node", 9, None, 1),
        ("none other-node", 9, None, 1),
        ("none other-node", None, None, 1),
        ("", 9, None, 1),
        ("40 other-node", 9, "no-squeue", 1),
        ("40 other-node", 9, None, 0),
        ("9 other-node", 9, "lives", 0),
        (f"none {NODE}", None, None, 0),
    ],
)
def test_what_another_node_may_have_is_left_alone(
    cluster: Cluster, holder: str, job: int | None, there: str | None, code: int
) -> None:
    """Unless its job is not in the queue any more, or is this one, queued again, and its heart stands still."""
    cluster.home.mkdir()
    (cluster.home / "holder").write_text(f"{holder} 1\n" if holder else "")
    if there is not None:
        (cluster.folder / there).touch()
    script = cluster.start("server.sbatch", job=job)
    if code == 0:
        cluster.http().close()
        assert not (cluster.folder / "lives").exists(), "it waits for a second minute"
        script.send_signal(signal.SIGTERM)
    _, complaint = script.communicate(timeout=END_S)
    assert script.returncode == code, complaint
    assert (b"turnlog: " in complaint) == (bool(code) or there == "lives")
    assert (cluster.home / "holder").exists() == bool(code)


def test_its_own_postgresql_is_there_again(own_cluster: Cluster) -> None:
    first = own_cluster.start("server.sbatch", job=7)
    with own_cluster.http() as http:
        made = http.post("/sessions", json={}).json()["session_id"]
        beat = (own_cluster.home / "heartbeat").read_text()
        until(lambda: (own_cluster.home / "heartbeat").read_text() not in ("", beat), END_S)
    first.send_signal(signal.SIGTERM)
    assert first.wait(END_S) == 0
    assert not (own_cluster.home / "postgres" / "postmaster.pid").exists()
    second = own_cluster.start("server.sbatch", job=8)
    with own_cluster.http() as http:
        assert http.get(f"/sessions/{made}").status_code == 200
    os.killpg(second.pid, signal.SIGKILL)
    lock = own_cluster.home / f"lock.{NODE}"
    subprocess.run(["flock", lock, "true"], check=True, timeout=END_S)  # Until all that was killed is gone.
    (own_cluster.home / "url").unlink()
    _, complaint = (third := own_cluster.start("server.sbatch", job=9)).communicate(timeout=END_S)
    assert third.returncode == 1
    assert b"nobody stopped" in complaint
    assert (own_cluster.home / "holder").exists(), "no other node may start while it runs"
    subprocess.run([own_cluster.commands / "pg_ctl", "stop", "-D", own_cluster.home / "postgres"], check=True)
    own_cluster.start("server.sbatch", job=9)
    with own_cluster.http() as http:
        assert http.get(f"/sessions/{made}").status_code == 200
