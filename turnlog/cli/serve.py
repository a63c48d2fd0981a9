"""`turnlog serve` and `migrate`, and what is run with its own options: `simulator`, `demo`, `bench`."""

from __future__ import annotations

import importlib
import ipaddress
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from turnlog.cli.run import DatabaseUrl, Failure, Json, UsageError, say, wants_json
from turnlog.keeper.options import ServeOptions, python_command
from turnlog.keeper.sockets import CannotListen, Listening, host_in_url, open_sockets

if TYPE_CHECKING:
    from app.settings import Settings

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""For a command that passes its arguments on."""

STOP_S = 60
"""How long a stopping server waits for open requests. A supervisor (systemd, a container) must wait longer: this, plus
ten seconds for turns whose client has disconnected."""


def serve(
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen at.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, help="Processes; more than one needs PostgreSQL.")] = 1,
    migrate: Annotated[
        bool, typer.Option("--migrate/--no-migrate", help="Bring the database up to date first.")
    ] = True,
    stop_s: Annotated[int, typer.Option(min=0, help="Seconds that a stop waits for open requests.")] = STOP_S,
) -> None:
    """Run a server. Its settings are TURNLOG_ variables (docs/settings.md).

    A second process waits beside it and takes over if it dies, so that clients are not refused meanwhile.
    """
    settings = _settings()
    if workers > 1 and settings.database_url.startswith("sqlite"):
        raise UsageError(
            f"--workers {workers}: SQLite is for one API process; run without --workers, "
            "or set TURNLOG_DATABASE_URL to PostgreSQL"
        )
    found = _listening(host, port)
    if migrate:
        _require_unserved(settings.database_url)
        upgrade(settings.database_url)
    _greet(settings, found.host, found.port)
    options = ServeOptions(tuple(one.fileno() for one in found.sockets), found.host, found.port, workers, stop_s)
    for one in found.sockets:
        one.set_inheritable(True)
    # this process has imported more than the keeper needs: it becomes the keeper, with its process id and sockets
    arguments = python_command("turnlog.keeper", options.to_json())
    os.execv(arguments[0], arguments)


def migrate(
    ctx: typer.Context,
    database_url: DatabaseUrl = None,
    as_json: Json = False,
) -> None:
    """Migrate the database to this version, as `alembic upgrade head` does in a checkout."""
    from ops.store_command import settings_for

    with _refusals():
        url = settings_for(database_url).database_url
    upgrade(url)
    from app.store.revision import revision_head

    if wants_json(ctx, as_json):
        from turnlog.cli.output import machine

        machine({"revision": revision_head()})
    else:
        say(f"the database is at revision {revision_head()}")


def bench(ctx: typer.Context) -> None:
    """Run a benchmark; --help lists them."""
    _pass_on(ctx, "ops.bench.__main__", "bench")


def simulator(ctx: typer.Context) -> None:
    """Run a simulated engine, which stands in for SGLang or vLLM; --help lists its options."""
    _pass_on(ctx, "ops.simulator.__main__", "demo")


def demo(ctx: typer.Context) -> None:
    """Run six agents, kill the server in the middle, check the export; on a terminal, leave the page open."""
    _pass_on(ctx, "ops.demo.__main__", "demo")


def _pass_on(ctx: typer.Context, module: str, extra: str) -> None:
    """Run the module's `main` with the command's arguments. Raises Failure if the extra's packages are missing."""
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        from app.extras import install

        raise Failure(f"{ctx.command_path} needs {error.name}: {install(extra)}") from None
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


def _require_unserved(url: str) -> None:
    """Raises Failure early, because the migration's own error would speak of a schema change that nobody asked for."""
    from app.store.engine import sqlite_lock
    from app.store.opening import acquire

    lock = sqlite_lock(url)
    if lock is not None:
        with _refusals():
            acquire(lock, url)
        lock.release()


def _listening(host: str, port: int) -> Listening:
    """Raises Failure."""
    try:
        return open_sockets(host, port)
    except CannotListen as error:
        raise Failure(str(error)) from None


def upgrade(url: str) -> None:
    """Run the migrations that were installed with the code. Raises Failure."""
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    from app.store.engine import ROOT

    config = Config()
    config.set_main_option("script_location", str(ROOT / "migrations").replace("%", "%%"))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise Failure(str(error)) from None
    except SystemExit as error:  # the migrations' environment reports its errors so
        raise Failure(str(error.code).removeprefix("turnlog: ")) from None


def _greet(settings: Settings, host: str, port: int) -> None:
    """Print the address and who has access, on standard error like the server's lines."""
    url = f"http://{host_in_url(host)}:{port}"
    say(f"{url}, the page at {url}/ui")
    if settings.admin_token:
        say("sign in with the first token of TURNLOG_ADMIN_TOKEN")
    elif _is_loopback(host):
        say("no TURNLOG_ADMIN_TOKEN: whoever is on this machine is served, nobody else")
    else:
        say("no TURNLOG_ADMIN_TOKEN: nobody from elsewhere is served but from TURNLOG_TRUSTED_NETWORKS; set a token")
    if not settings.upstreams:
        say("no TURNLOG_UPSTREAMS: chat is 503 no_upstream until an engine is added (turnlog engines add URL)")
    sys.stderr.flush()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
