"""`turnlog checkpoint`: make, list, restore and delete checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from turnlog.amounts import amount
from turnlog.cli.remote import remote
from turnlog.cli.running import UsageError, printed_as_json, server_options
from turnlog.client.address import segment

checkpoint_app = typer.Typer(help="Checkpoints: list, make, restore, delete.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The checkpoint's name.")]


@checkpoint_app.command("list")
@server_options
def list_checkpoints(ctx: typer.Context) -> None:
    """List the checkpoints, the oldest first."""
    found = remote(ctx).read("GET", "/checkpoints")
    if not printed_as_json(ctx, found):
        from turnlog.cli.output import Column, since, table

        columns = [
            Column("checkpoint", "name", whole=True),
            Column("made", lambda one: since(one["created_at"]), right=True),
            Column("cut"),
            Column("state"),
            Column("sessions", right=True),
            Column("groups", right=True),
            Column("erased", right=True),
            Column("before the restore of", "restores"),
        ]
        table(columns, found["checkpoints"])


@checkpoint_app.command()
@server_options
def make(
    ctx: typer.Context,
    name: Name,
    drain: Annotated[bool, typer.Option("--drain", help="Hold new turns, and wait for those in flight.")] = False,
    drain_s: Annotated[float | None, typer.Option(min=0, help="With --drain: how long to wait (600).")] = None,
) -> None:
    """Make a checkpoint of all sessions, groups and acknowledgements."""
    if drain_s is not None and not drain:
        raise UsageError("--drain-s needs --drain")
    body: dict[str, object] = {"name": name, "cut": "drain" if drain else "now"}
    body |= {} if drain_s is None else {"drain_s": drain_s}
    made = remote(ctx).read("POST", "/checkpoints", body=body, slow=True)
    if not printed_as_json(ctx, made):
        from turnlog.cli.output import line

        line(f"checkpoint {name}: {amount(made['sessions'], 'session')}, {amount(made['groups'], 'group')}", "bold")


@checkpoint_app.command()
@server_options
def restore(ctx: typer.Context, name: Name) -> None:
    """Take the store back to a checkpoint. Nothing is deleted: what it was is a checkpoint, too."""
    done = remote(ctx).read("POST", f"/checkpoints/{segment(name)}/restore", slow=True)
    if not printed_as_json(ctx, done):
        from turnlog.cli.output import line

        line(f"the store is what it was at checkpoint {name}; {done['before']} is what it was before", "bold")
        line(f"{amount(done['sessions'], 'session')} changed, {done['undone']} of them undone")
        for kind in ("erased", "unreadable"):
            if done[kind]:
                line(f"{len(done[kind])} {kind}: {', '.join(done[kind][:10])}")


@checkpoint_app.command()
@server_options
def delete(ctx: typer.Context, name: Name) -> None:
    """Delete a checkpoint. Sessions stay as they are; what only it kept is freed as usual."""
    remote(ctx).call("DELETE", f"/checkpoints/{segment(name)}")
    printed_as_json(ctx, {"name": name, "state": "deleted"})
