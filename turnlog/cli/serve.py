"""`turnlog serve` and `migrate`, and what is run with its own options: `simulator`, `demo`, `bench`."""

from __future__ import annotations

import errno
import importlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from turnlog.cli.running import DatabaseUrl, Failure, Json, UsageError, say
from turnlog.supervisor import BACKLOG, ServeOptions, in_url, python_command

if TYPE_CHECKING:
    from app.settings import Settings

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""For a command that passes its arguments on."""

STOP_S = 60
"""How long a stopping server waits for open requests. A supervisor (systemd, a container) must wait longer: this, plus
ten seconds for turns whose client has disconnected."""


TAKEN_S = 2.0
"""How long an address may be taken still: the server of a supervisor that was killed is ending."""


def serve(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, help="Processes; more than one needs PostgreSQL.")] = 1,
    migrate: Annotated[bool, typer.Option("--migrate/--no-migrate", help="Migrate the database first.")] = True,
    stop_s: Annotated[
        int, typer.Option(min=0, help="Seconds that a stopping server waits for open requests.")
    ] = STOP_S,
) -> None:
    """Run a server. Its settings are TURNLOG_ variables (docs/settings.md).

    If it dies, it is restarted; connections wait meanwhile.
    """
    if workers > 1 and _settings().database_url.startswith("sqlite"):
        raise UsageError(
            f"--workers {workers}: SQLite is for one API process; run without --workers, "
            "or set TURNLOG_DATABASE_URL to PostgreSQL"
        )
    sockets = _systemd_sockets()
    if sockets:
        host, port = sockets[0].getsockname()[:2]
    else:
        sockets = _free_address(host, port)
        port = sockets[0].getsockname()[1]
    options = ServeOptions(tuple(each.fileno() for each in sockets), host, port, workers, stop_s, migrate)
    for each in sockets:
        each.set_inheritable(True)
    # this process has imported more than the supervisor needs: it becomes that, with its process id and sockets
    arguments = python_command("turnlog.supervisor", options.to_json())
    os.execv(arguments[0], arguments)


def migrate(database_url: DatabaseUrl = None, as_json: Json = False) -> None:
    """Migrate the database to this version, as `alembic upgrade head` does in a checkout."""
    from app.store.opening import revision_head, upgrade
    from ops.store_command import settings_for

    with _refusals():
        upgrade(settings_for(database_url).database_url)
    if as_json:
        from turnlog.cli.output import machine

        machine({"revision": revision_head()})
    else:
        say(f"the database is at revision {revision_head()}")


def bench(ctx: typer.Context) -> None:
    """Run a benchmark; --help lists them."""
    try:
        importlib.import_module("ops.bench.__main__")
    except ModuleNotFoundError as error:
        from app.extras import install_command

        raise Failure(f"{ctx.command_path} needs {error.name}: {install_command('bench')}") from None
    _pass_on(ctx, "ops.bench.__main__")


def simulator(ctx: typer.Context) -> None:
    """Run a simulated engine, which stands in for SGLang or vLLM; --help lists its options."""
    _pass_on(ctx, "ops.simulator.__main__")


def demo(ctx: typer.Context) -> None:
    """Run six agents, kill the server in the middle, check the export; on a terminal, leave the page open.

    With --full: 60 sessions of coding, shop, research and web agents, to look at.
    """
    _pass_on(ctx, "ops.demo.__main__")


def _pass_on(ctx: typer.Context, module: str) -> None:
    """Run the module's `main` with the command's arguments."""
    main = importlib.import_module(module).main
    raise typer.Exit(main(ctx.args, ctx.command_path))


def _settings() -> Settings:
    """Raises Failure."""
    from app.settings import load_settings

    with _refusals():
        return load_settings()


@contextmanager
def _refusals() -> Iterator[None]:
    """Raises Failure with the lines that the server would exit with."""
    from app.errors import StartupError

    try:
        yield
    except StartupError as error:
        raise Failure(error.lines[0], more=error.lines[1:]) from None


SYSTEMD_FIRST = 3
"""systemd's first descriptor (`sd_listen_fds(3)`)."""

SYSTEMD_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


def _systemd_sockets() -> list[socket.socket]:
    """What systemd has bound for this process. The variables are removed: they are not for child processes.

    Raises Failure.
    """
    given = {name: os.environ.pop(name, "") for name in SYSTEMD_VARIABLES}
    if given["LISTEN_PID"] != str(os.getpid()) or not given["LISTEN_FDS"].isdecimal():
        return []
    sockets = []
    for descriptor in range(SYSTEMD_FIRST, SYSTEMD_FIRST + int(given["LISTEN_FDS"])):
        try:
            adopted = socket.socket(fileno=descriptor)
        except OSError as error:
            raise Failure(f"LISTEN_FDS: descriptor {descriptor} is not a socket: {error.strerror}") from None
        is_internet = adopted.family in (socket.AF_INET, socket.AF_INET6)
        if not is_internet or not adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise Failure("the socket unit: expected ListenStream= with an address and a port, and Accept=no")
        sockets.append(adopted)
    return sockets


def _free_address(host: str, port: int) -> list[socket.socket]:
    """The sockets of `_bind`, within TAKEN_S. Raises Failure."""
    deadline = time.monotonic() + TAKEN_S
    while True:
        try:
            return _bind(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise Failure(f"cannot listen on {in_url(host, port)}: {error.strerror or error}") from None
            time.sleep(0.01)


def _bind(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of the host. Port 0: one that is free, the same for all. Raises OSError."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found):
            bound = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind((address, sockets[0].getsockname()[1] or port))
            bound.listen(BACKLOG)
    except OSError:
        for bound in sockets:
            bound.close()
        raise
    return sockets
