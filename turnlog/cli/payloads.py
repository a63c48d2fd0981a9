"""`turnlog payloads`: the object storage of replay payloads."""

from __future__ import annotations

from typing import Any

import typer

from turnlog.amounts import amount
from turnlog.cli.remote import remote
from turnlog.cli.run import printed_as_json, server_options

payloads_app = typer.Typer(help="Replay payloads in object storage: move them, own their place.", no_args_is_help=True)


@payloads_app.command()
@server_options
def move(ctx: typer.Context) -> None:
    """Move all replay payloads to where TURNLOG_PAYLOADS of the server puts new ones, while turns go on."""
    moved = lost = size = 0
    after: dict[str, Any] | None = None
    while True:
        step = remote(ctx).read("POST", "/payloads/move", body={"after": after}, slow=True)
        moved, lost, size = moved + step["moved"], lost + step["lost"], size + step["bytes"]
        after = step["after"]
        if after is None:
            break
    if not printed_as_json(ctx, {"moved": moved, "lost": lost, "bytes": size}):
        typer.echo(f"moved {amount(moved, 'chunk')}, {size} bytes; {lost} are lost or damaged, and stay where they are")


@payloads_app.command()
@server_options
def adopt(ctx: typer.Context) -> None:
    """Say that no other store uses the place any more, after a restore: what nothing refers to is deleted there."""
    remote(ctx).read("POST", "/payloads/adopt")
