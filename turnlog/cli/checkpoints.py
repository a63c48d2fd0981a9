"""`turnlog checkpoint`: make, list, restore and delete checkpoints."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from turnlog.amounts import amount
from turnlog.cli import complete
from turnlog.cli.parameters import given, read_object, takes
from turnlog.cli.remote import remote
from turnlog.cli.running import UsageError, printed_as_json, server_options
from turnlog.client.address import default_run, segment
from turnlog.client.lines import present
from turnlog.parameters import CheckpointFilters

checkpoint_app = typer.Typer(help="List, make, restore and delete checkpoints.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The checkpoint's name.")]
Run = Annotated[
    str | None,
    typer.Option("--run", help="Its run (default: TURNLOG_RUN); *: the whole store.", autocompletion=complete.runs),
]


@checkpoint_app.command("list")
@server_options
@takes(CheckpointFilters)
def list_checkpoints(ctx: typer.Context, **filters: Any) -> None:
    """List the checkpoints, the oldest first."""
    found = remote(ctx).read("GET", "/checkpoints", parameters=given(filters))
    if not printed_as_json(ctx, found):
        from turnlog.cli.output import Column, since, table

        columns = [
            Column("run"),
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
    run: Run = None,
    drain: Annotated[bool, typer.Option("--drain", help="Hold new turns, and wait for those in flight.")] = False,
    drain_s: Annotated[float | None, typer.Option(min=0, help="With --drain: how long to wait (600).")] = None,
    metadata: Annotated[str | None, typer.Option(help="A JSON object.")] = None,
) -> None:
    """Make a checkpoint of a run's sessions, groups and acknowledgements."""
    if drain_s is not None and not drain:
        raise UsageError("--drain-s needs --drain")
    body: dict[str, object] = {"name": name, "cut": "drain" if drain else "now"}
    body |= present({"run": run or default_run(), "drain_s": drain_s, "metadata": read_object("--metadata", metadata)})
    made = remote(ctx).read("POST", "/checkpoints", body=body, slow=True)
    if not printed_as_json(ctx, made):
        from turnlog.cli.output import line

        line(f"checkpoint {name}: {amount(made['sessions'], 'session')}, {amount(made['groups'], 'group')}", "bold")


@checkpoint_app.command()
@server_options
def restore(ctx: typer.Context, name: Name, run: Run = None) -> None:
    """Restore a run to a checkpoint. Nothing is deleted: its state before becomes a checkpoint, too."""
    of_run = present({"run": run or default_run()})
    done = remote(ctx).read("POST", f"/checkpoints/{segment(name)}/restore", parameters=of_run, slow=True)
    if not printed_as_json(ctx, done):
        from turnlog.cli.output import line

        what = "the store" if done["run"] == "*" else f"run {done['run']}"
        line(f"{what} is restored to checkpoint {name}; checkpoint {done['before']} has what it was before", "bold")
        line(f"{amount(done['sessions'], 'session')} changed, {done['undone']} of them undone")
        for kind in ("erased", "unreadable"):
            if done[kind]:
                line(f"{len(done[kind])} {kind}: {', '.join(done[kind][:10])}")


@checkpoint_app.command()
@server_options
def delete(ctx: typer.Context, name: Name, run: Run = None) -> None:
    """Delete a checkpoint. Sessions stay as they are; what only it kept is freed as usual."""
    remote(ctx).call("DELETE", f"/checkpoints/{segment(name)}", parameters=present({"run": run or default_run()}))
    printed_as_json(ctx, {"name": name, "state": "deleted"})
