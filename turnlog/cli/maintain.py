"""Maintenance commands. They open the database themselves; some require that no server runs.

Exit codes are those of `ops.store_command`: 1 means that a problem was found, 2 that the command could not run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnlog.cli.running import DatabaseUrl, Json, UsageError


def verify(database_url: DatabaseUrl = None, as_json: Json = False) -> None:
    """Check everything in the store against the log. A server may be running."""
    from ops.verify import perform

    raise typer.Exit(perform(database_url, as_json=as_json))


def backup(
    copy: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    database_url: DatabaseUrl = None,
    as_json: Json = False,
) -> None:
    """Copy an SQLite store while its server runs. PostgreSQL has its own tools (docs/operations.md)."""
    from ops.backup import backup

    raise typer.Exit(backup(database_url, copy, as_json=as_json))


def restore(
    copy: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The file that backup wrote; none for PostgreSQL.")
    ] = None,
    database_url: DatabaseUrl = None,
    as_json: Json = False,
) -> None:
    """Replace an SQLite store with a backup, or finish the restore of a PostgreSQL one. No server may be running."""
    from ops.backup import restore

    raise typer.Exit(restore(database_url, copy, as_json=as_json))


def replay(
    session: Annotated[str | None, typer.Argument(help="A session's id.")] = None,
    seq: Annotated[
        int | None, typer.Option("--at", "--seq", min=1, max=2**63 - 1, help="The state after this event.")
    ] = None,
    with_events: Annotated[bool, typer.Option("--events", help="Also show the events up to there.")] = False,
    heads: Annotated[bool, typer.Option("--heads", help="Compare every session's head with its log instead.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="With --heads: write what the log says. No server may be running.")
    ] = False,
    database_url: DatabaseUrl = None,
    as_json: Json = False,
) -> None:
    """Fold a session's log directly from the store, or check the heads of all sessions."""
    if heads == (session is not None):
        raise UsageError("name a session, or --heads")
    if heads and (seq is not None or with_events):
        raise UsageError("--at and --events require a session")
    if fix and not heads:
        raise UsageError("--fix needs --heads")
    from ops.replay import replay

    raise typer.Exit(replay(database_url, session, seq, with_events=with_events, fix=fix, as_json=as_json))
