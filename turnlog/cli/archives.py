"""`turnlog archive`: closed sessions as Parquet files in object storage."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from turnlog.amounts import amount
from turnlog.cli.remote import remote
from turnlog.cli.run import printed_as_json, server_options

archive_app = typer.Typer(help="Archives of closed sessions: write, list, bring back.", no_args_is_help=True)


@archive_app.command()
@server_options
def run(
    ctx: typer.Context,
    closed_for: Annotated[float, typer.Option(min=0, help="Only sessions that were closed so many seconds ago.")] = 0.0,
) -> None:
    """Move closed sessions out of the database into archives, while turns go on."""
    archived = left = size = 0
    after: dict[str, Any] | None = None
    while True:
        step = remote(ctx).read("POST", "/archives", body={"closed_for_s": closed_for, "after": after}, slow=True)
        archived, left, size = archived + step["archived"], left + step["left"], size + step["bytes"]
        after = step["after"]
        if after is None:
            break
    if not printed_as_json(ctx, {"archived": archived, "left": left, "bytes": size}):
        typer.echo(f"archived {amount(archived, 'session')}, {size} bytes; {left} changed meanwhile or cannot be read")


@archive_app.command("list")
@server_options
def list_archives(ctx: typer.Context) -> None:
    """List the archives, the oldest first."""
    found = remote(ctx).read("GET", "/archives")
    if not printed_as_json(ctx, found):
        from turnlog.cli.output import Column, since, table

        columns = [
            Column("archive", "name", whole=True),
            Column("made", lambda one: since(one["created_at"]), right=True),
            Column("sessions", right=True),
        ]
        table(columns, found["archives"])


@archive_app.command()
@server_options
def restore(ctx: typer.Context, session: Annotated[str, typer.Argument(help="The session's id.")]) -> None:
    """Bring an archived session back into the database."""
    found = remote(ctx).read("POST", "/archives/restore", body={"session_id": session}, slow=True)
    if not printed_as_json(ctx, found):
        typer.echo("restored" if found["restored"] else "it was not archived")
