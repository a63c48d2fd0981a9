"""The root of the command line: common options and all commands."""

from __future__ import annotations

from typing import Annotated

import typer

from turnlog.cli import (
    archive,
    checkpoints,
    export,
    fleet,
    maintain,
    search,
    sessions,
    tail,
    tree,
    watch,
    write,
)
from turnlog.cli import read as reading
from turnlog.cli import serve as serving
from turnlog.cli.doctor import command as doctor
from turnlog.cli.run import Commands, ServerCommand, server_options, settings_options

app = typer.Typer(
    name="turnlog",
    cls=Commands,
    help="Turnlog's command line: run a server, look into it, keep its store.",
    epilog="Inspection and control commands call the server at --url (TURNLOG_URL). "
    "Maintenance commands open the database (--database-url).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

NUMBERS = {"ignore_unknown_options": True}
"""A negative number is no option."""

OBSERVE, MAKE, ORDER, KEEP, RUN = "Look", "Sessions", "The fleet", "The store", "Run"

for _panel, _name, _function in (
    (RUN, "serve", serving.serve),
    (RUN, "migrate", serving.migrate),
    (RUN, "doctor", doctor.doctor),
    (OBSERVE, "sessions", sessions.sessions),
    (OBSERVE, "show", sessions.show),
    (OBSERVE, "read", reading.read),
    (OBSERVE, "watch", watch.watch),
    (OBSERVE, "open", sessions.open_page),
    (OBSERVE, "tree", tree.tree),
    (OBSERVE, "tail", tail.tail),
    (OBSERVE, "groups", sessions.groups),
    (OBSERVE, "search", search.search),
    (OBSERVE, "export", export.export),
    (MAKE, "create", write.create),
    (MAKE, "fork", write.fork),
    (MAKE, "reward", write.reward),
    (MAKE, "annotate", write.annotate),
    (MAKE, "close", write.close),
    (ORDER, "pause", fleet.pause),
    (ORDER, "resume", fleet.resume),
    (KEEP, "archive", archive.archive),
    (KEEP, "import", archive.bring_back),
    (KEEP, "verify", maintain.verify),
    (KEEP, "backup", maintain.backup),
    (KEEP, "restore", maintain.restore),
    (KEEP, "replay", maintain.replay),
):
    _calls_server = _panel in (OBSERVE, MAKE, ORDER) or _name in ("archive", "import")
    _made = app.command(
        _name,
        rich_help_panel=_panel,
        cls=None if _calls_server else ServerCommand,
        context_settings=NUMBERS if _name == "reward" else None,
    )
    _made(server_options(_function) if _calls_server else settings_options(_function))
for _name, _program in (("simulator", serving.simulator), ("demo", serving.demo), ("bench", serving.bench)):
    app.command(
        _name, cls=ServerCommand, rich_help_panel=RUN, add_help_option=False, context_settings=serving.PASSED_ON
    )(_program)
app.add_typer(fleet.engines_app, name="engines", rich_help_panel=ORDER)
app.add_typer(checkpoints.checkpoint_app, name="checkpoint", rich_help_panel=ORDER)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"turnlog {version('turnlog')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None: ...
