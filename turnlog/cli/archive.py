"""`turnlog archive` and `turnlog import`: old rollouts leave the database as Parquet files, and come back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from turnlog.amounts import amount
from turnlog.cli.parameters import by_key, takes
from turnlog.cli.remote import remote
from turnlog.cli.running import UsageError, printed_as_json, say
from turnlog.parameters import Selection

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@takes(Selection)
def archive(
    ctx: typer.Context,
    older_than: Annotated[str, typer.Option(help="Rollouts closed at least this long ago: 90s, 30m, 12h, 7d.")],
    to: Annotated[
        str,
        typer.Option(
            help="A folder's URL, as the server sees it: s3://…, gs://…, az://…, file:///… below its TURNLOG_FILE_ROOT."
        ),
    ],
    **filters: Any,
) -> None:
    """Move old rollouts out of the database into Parquet files, while turns go on."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", older_than)
    if matched is None:
        raise UsageError(f"--older-than {older_than}: expected a number and s, m, h or d, such as 7d")
    body: dict[str, Any] = {"to": to, "older_than_s": float(matched[1]) * _UNITS[matched[2]], "after": None}
    body |= {name: value for name, value in filters.items() if value} | {"metadata": by_key(filters["metadata"])}
    told: dict[str, Any] = {"archived": 0, "left": 0, "bytes": 0, "files": []}
    while True:
        step = remote(ctx).read("POST", "/archives", body=body, slow=True)
        for name in ("archived", "left", "bytes"):
            told[name] += step[name]
        if step["file"] is not None:
            told["files"].append(step["file"])
            say(f"{amount(step['archived'], 'session')} in {step['file']}")
        body["after"] = step["after"]
        if body["after"] is None:
            break
    if not printed_as_json(ctx, told):
        files = amount(len(told["files"]), "file")
        typer.echo(f"archived {amount(told['archived'], 'session')} in {files}, {told['bytes']} bytes")


def bring_back(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(help="The file's URL, or its path below the server's TURNLOG_FILE_ROOT.")],
) -> None:
    """Bring the sessions of an archive back into the database."""
    url = file if "://" in file else Path(file).absolute().as_uri()
    told = remote(ctx).read("POST", "/archives/import", body={"file": url}, slow=True)
    if not printed_as_json(ctx, told):
        typer.echo(f"imported {amount(told['imported'], 'session')}, {told['there']} were already there")
        for one in told["refused"]:
            say(f"{one['session_id']} was not imported: {one['reason']}")
