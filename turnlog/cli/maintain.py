"""Maintenance commands. They open the database themselves; some require that no server runs.

Exit codes are those of `ops.keeping`: 1 means that a problem was found, 2 that the command could not run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from turnlog.cli.run import DatabaseUrl, Json, UsageError, wants_json


def verify(ctx: typer.Context, database_url: DatabaseUrl = None, as_json: Json = False) -> None:
    """Check everything in the store against the log. A server may run."""
    from ops.verify import perform

    raise typer.Exit(perform(database_url, as_json=wants_json(ctx, as_json)))


Keep = Annotated[int | None, typer.Option("--keep", min=1, help="Delete all but the newest N backups.")]


def backup(
    ctx: typer.Context,
    place: Annotated[str, typer.Argument(help="A file to make; or a folder or URL (s3, gs, az, file) with backups.")],
    keep: Keep = None,
    percent: Annotated[
        float, typer.Option("--percent", min=1, max=100, help="How much of the time it may work.")
    ] = 25.0,
    scratch: Annotated[
        Path | None, typer.Option("--scratch", help="The folder of the temporary copy; default: the store's.")
    ] = None,
    database_url: DatabaseUrl = None,
    as_json: Json = False,
) -> None:
    """Back up an SQLite store while its server runs; for PostgreSQL, print how."""
    from ops.backup import Options, perform

    options = Options(percent=percent, keep=keep, scratch=scratch)
    raise typer.Exit(perform(database_url, place, options, as_json=wants_json(ctx, as_json)))


def backups(
    ctx: typer.Context,
    place: Annotated[str, typer.Argument(help="The folder or URL.")],
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """List the backups in a bucket or folder, oldest first."""
    from ops.backups import perform

    raise typer.Exit(perform(place, keep, as_json=wants_json(ctx, as_json)))


def restore(
    ctx: typer.Context,
    place: Annotated[
        str | None, typer.Argument(help="The file, folder or URL that was given to backup; none for PostgreSQL.")
    ] = None,
    name: Annotated[str | None, typer.Option("--at", help="One of a bucket's backups; default: the newest.")] = None,
    database_url: DatabaseUrl = None,
    as_json: Json = False,
) -> None:
    """Replace an SQLite store by a backup, or finish the restore of a PostgreSQL one. No server may run."""
    from ops.restore import perform

    raise typer.Exit(perform(database_url, place, name, as_json=wants_json(ctx, as_json)))


def vacuum(
    ctx: typer.Context,
    full: Annotated[bool, typer.Option("--full", help="Write all content anew; on SQLite no server may run.")] = False,
    database_url: DatabaseUrl = None,
    as_json: Json = False,
) -> None:
    """Return unused space, which also removes traces of erased content."""
    from ops.compact import perform

    raise typer.Exit(perform(database_url, full=full, as_json=wants_json(ctx, as_json)))


def retain(ctx: typer.Context, database_url: DatabaseUrl = None, as_json: Json = False) -> None:
    """Close, free and erase once what is due by the server's settings. On SQLite no server may run."""
    from ops.retain import perform

    raise typer.Exit(perform(database_url, as_json=wants_json(ctx, as_json)))


def replay(
    ctx: typer.Context,
    session: Annotated[str | None, typer.Argument(help="A session's id.")] = None,
    seq: Annotated[int | None, typer.Option("--at", "--seq", min=1, help="The state after this event.")] = None,
    with_events: Annotated[bool, typer.Option("--events", help="The events up to there, too.")] = False,
    heads: Annotated[bool, typer.Option("--heads", help="Compare every session's head with its log instead.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="With --heads: write what the log says. No server may run.")
    ] = False,
    database_url: DatabaseUrl = None,
    as_json: Json = False,
) -> None:
    """Fold a session's log directly from the store, or check the heads of all sessions."""
    if heads == (session is not None):
        raise UsageError("name a session, or --heads")
    if heads and (seq is not None or with_events):
        raise UsageError("--at and --events are for a session")
    if fix and not heads:
        raise UsageError("--fix needs --heads")
    from app.replay import main

    if database_url is not None:
        os.environ["TURNLOG_DATABASE_URL"] = database_url
    switches = {
        "--events": with_events,
        "--heads": heads,
        "--fix": fix,
        "--json": wants_json(ctx, as_json),
    }
    arguments = [switch for switch, wanted in switches.items() if wanted]
    if seq is not None:
        arguments += ["--seq", str(seq)]
    if session is not None:
        arguments += ["--", session]
    raise typer.Exit(main(arguments, "turnlog replay"))
