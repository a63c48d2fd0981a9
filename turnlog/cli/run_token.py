"""`turnlog run-token`: make or end the token of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from turnlog.cli import complete
from turnlog.cli.remote import remote
from turnlog.cli.running import printed_as_json
from turnlog.client.address import segment


def run_token(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(help="The run's name.", autocompletion=complete.runs)],
    end: Annotated[bool, typer.Option("--end", help="Revoke the run's token without creating a new one.")] = False,
) -> None:
    """Create a run's token, or replace it. The token is for everything within the run."""
    path = f"/runs/{segment(run)}/token"
    if end:
        remote(ctx).call("DELETE", path)
        printed_as_json(ctx, {"run": run, "token": None})
        return
    made = remote(ctx).read("POST", path)
    if not printed_as_json(ctx, made):
        from turnlog.cli.output import line

        line(made["token"])
