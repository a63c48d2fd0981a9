"""`turnlog runs` and `turnlog run`: what became of runs, and their end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from turnlog.amounts import amount
from turnlog.cli import complete
from turnlog.cli.remote import remote
from turnlog.cli.running import UsageError, printed_as_json, say, say_if_none
from turnlog.client.address import segment

MOST = 1000


def runs(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=MOST, help="Maximum number of runs.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Continue where an earlier list ended.")] = None,
) -> None:
    """List runs with their sessions, turns, groups and rewards."""
    found = remote(ctx).read("GET", "/runs", parameters={"limit": limit, "cursor": cursor})
    if printed_as_json(ctx, found):
        return
    from turnlog.cli.output import Column, since, table

    columns = [
        Column("run", whole=True),
        Column("status"),
        Column("open", lambda one: one["sessions"]["open"], right=True),
        Column("closed", lambda one: one["sessions"]["closed"], right=True),
        Column("turns", right=True),
        Column("groups complete", lambda one: one["groups"]["complete"], right=True),
        Column("handed out", lambda one: one["groups"]["handed_out"], right=True),
        Column("failed", lambda one: sum(one["failed"].values()), right=True),
        Column("mean reward", lambda one: (one["reward"] or {}).get("mean"), right=True),
        Column("version", lambda one: one["weight_versions"]["newest"], right=True),
        Column("last change", lambda one: since(one["last_at"]), right=True),
        Column("note", long=True),
    ]
    table(columns, found["runs"])
    say_if_none(found["runs"], "run")
    if found["next_cursor"] is not None:
        say(f"more with --cursor {found['next_cursor']}")


def run(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The run's name.", autocompletion=complete.runs)],
    close: Annotated[bool, typer.Option("--close", help="Close it and its open sessions, for good.")] = False,
    erase: Annotated[bool, typer.Option("--erase", help="Erase all of its sessions, and free its name.")] = False,
) -> None:
    """Show a run's figures, or close or erase it."""
    if close and erase:
        raise UsageError("--erase closes the run, too: --close is not needed")
    path = f"/runs/{segment(name)}"
    if not (close or erase):
        found = remote(ctx).read("GET", path)
        if not printed_as_json(ctx, found):
            _print(found)
        return
    if not erase:
        remote(ctx).call("DELETE", path, slow=True)
        status = "closed"
    else:
        status = "erased" if remote(ctx).erase(path) else "erasing"
    if not printed_as_json(ctx, {"run": name, "status": status}):
        left = "being erased: object storage or archives still have some of it; the server continues"
        say(f"run {name} is {left if status == 'erasing' else status}")


def _print(found: Mapping[str, Any]) -> None:
    from turnlog.cli.output import line, when

    sessions, groups, tokens = found["sessions"], found["groups"], found["tokens"]
    line(f"run {found['run']}, {found['status']}", "bold")
    if found["note"]:
        line(found["note"])
    line(f"sessions: {', '.join(f'{count} {status}' for status, count in sessions.items())}")
    line(f"{amount(found['turns'], 'turn')}, tokens: {tokens['prompt']} of prompts, {tokens['generated']} generated")
    line(f"groups: {', '.join(f'{count} {name}'.replace('_', ' ') for name, count in groups.items())}")
    if (reward := found["reward"]) is not None:
        line(f"{amount(reward['count'], 'reward')}: mean {reward['mean']:.6g}, sample std {reward['std']:.6g}")
    if found["failed"]:
        line(f"failed rollouts: {', '.join(f'{count} {kind}' for kind, count in found['failed'].items())}")
    versions = found["weight_versions"]
    if versions["newest"] is not None:
        behind = "" if versions["oldest_live"] is None else f", the oldest of an open session {versions['oldest_live']}"
        line(f"newest weight version {versions['newest']}{behind}")
    if found["errors"]:
        line(f"errors: {', '.join(f'{count} {kind}' for kind, count in found['errors'].items())}")
    limits = {name: most for name, most in found["limits"].items() if most is not None}
    if limits:
        line(f"limits: {', '.join(f'{most} {name}' for name, most in limits.items())}")
    if found["first_at"] is not None:
        line(f"from {when(found['first_at'])} to {when(found['last_at'])}")
