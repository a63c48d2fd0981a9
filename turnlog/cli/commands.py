"""The root of the command line: common options and all commands."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from turnlog.cli import print_version
from turnlog.cli.running import Commands, ServerCommand, server_options, settings_options

NUMBERS = {"ignore_unknown_options": True}
"""A negative number is no option."""

OBSERVE, MAKE, ORDER, KEEP, RUN = "Look", "Sessions", "The fleet", "The store", "Run"

COMMANDS = {
    "serve": (RUN, "serve", "serve"),
    "migrate": (RUN, "serve", "migrate"),
    "doctor": (RUN, "doctor.command", "doctor"),
    "sessions": (OBSERVE, "sessions", "sessions"),
    "show": (OBSERVE, "sessions", "show"),
    "read": (OBSERVE, "read", "read"),
    "diff": (OBSERVE, "diff", "diff"),
    "watch": (OBSERVE, "watch", "watch"),
    "open": (OBSERVE, "sessions", "open_page"),
    "tree": (OBSERVE, "tree", "tree"),
    "tail": (OBSERVE, "tail", "tail"),
    "groups": (OBSERVE, "sessions", "groups"),
    "runs": (OBSERVE, "runs", "runs"),
    "search": (OBSERVE, "search", "search"),
    "export": (OBSERVE, "export", "export"),
    "create": (MAKE, "write", "create"),
    "fork": (MAKE, "write", "fork"),
    "reward": (MAKE, "write", "reward"),
    "annotate": (MAKE, "write", "annotate"),
    "close": (MAKE, "write", "close"),
    "pause": (ORDER, "fleet", "pause"),
    "resume": (ORDER, "fleet", "resume"),
    "run": (ORDER, "runs", "run"),
    "run-token": (ORDER, "run_token", "run_token"),
    "archive": (KEEP, "archive", "archive"),
    "import": (KEEP, "archive", "bring_back"),
    "verify": (KEEP, "maintain", "verify"),
    "backup": (KEEP, "maintain", "backup"),
    "restore": (KEEP, "maintain", "restore"),
    "replay": (KEEP, "maintain", "replay"),
    "simulator": (RUN, "serve", "simulator"),
    "expose": (RUN, "expose", "expose"),
    "demo": (RUN, "serve", "demo"),
    "bench": (RUN, "serve", "bench"),
    "engines": (ORDER, "fleet", "engines_app"),
    "checkpoint": (ORDER, "checkpoints", "checkpoint_app"),
}
"""By name: the panel of the help, the module below `turnlog.cli`, and the function or the group of commands in it."""


def app_of(only: str | None = None) -> typer.Typer:
    """All commands, or where `only` is one's name that one: to import and describe the others takes 0.1 s."""
    app = typer.Typer(
        name="turnlog",
        cls=Commands,
        help="Turnlog's command line: run a server, inspect it, maintain its store.",
        epilog="Inspection and control commands call the server at --url (TURNLOG_URL). "
        "Maintenance commands open the database (--database-url).",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in (only,) if only in COMMANDS else COMMANDS:
        _add(app, name)
    return app


def _add(app: typer.Typer, name: str) -> None:
    panel, module, place = COMMANDS[name]
    command = getattr(import_module(f"turnlog.cli.{module}"), place)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name, rich_help_panel=panel)
    elif name in ("simulator", "demo", "bench"):
        from turnlog.cli.serve import PASSED_ON

        app.command(name, cls=ServerCommand, rich_help_panel=panel, add_help_option=False, context_settings=PASSED_ON)(
            command
        )
    elif panel in (OBSERVE, MAKE, ORDER) or module in ("archive", "expose"):
        settings = NUMBERS if name == "reward" else None
        app.command(name, rich_help_panel=panel, context_settings=settings)(server_options(command))
    else:
        app.command(name, cls=ServerCommand, rich_help_panel=panel)(settings_options(command))


def _version(wanted: bool) -> None:
    if wanted:
        print_version()
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...
