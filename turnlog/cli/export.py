"""`turnlog export`: training rows to standard output, or to a file that appears only when it is complete."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnlog.cli.remote import remote
from turnlog.cli.run import INTERRUPTED, Failure, Json, Token, Url, Usage, say, wants_json
from turnlog.errors import Unreachable

if TYPE_CHECKING:
    from turnlog.client._sync.transport import Transport

KEPT = "; what has come is kept, the same command goes on from there"


def export(
    ctx: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="The file to make; none: standard output.")] = None,
    format: Annotated[str, typer.Option(help="ndjson, parquet, safetensors, msgpack, atif, messages.")] = "ndjson",
    shape: Annotated[str, typer.Option(help="turnlog, or a trainer's: slime, verl, skyrl, trl, …")] = "turnlog",
    session: Annotated[str | None, typer.Option(help="Only this session.")] = None,
    group: Annotated[str | None, typer.Option(help="Only this group.")] = None,
    status: Annotated[str | None, typer.Option(help="Rows: completed, truncated, aborted.")] = None,
    session_status: Annotated[str | None, typer.Option(help="Sessions: open, closed, erased.")] = None,
    since: Annotated[str | None, typer.Option(help="Seconds since the epoch, or ISO 8601.")] = None,
    until: Annotated[str | None, typer.Option(help="Seconds since the epoch, or ISO 8601.")] = None,
    min_reward: Annotated[float | None, typer.Option()] = None,
    max_reward: Annotated[float | None, typer.Option()] = None,
    max_staleness: Annotated[int | None, typer.Option(help="At most so many weight versions behind.")] = None,
    weight_version: Annotated[int | None, typer.Option(help="What counts as current; default: the newest.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Cut rows to at most so many tokens.")] = None,
    truncate: Annotated[str | None, typer.Option(help="turn (default: at a turn's end), token (inside one).")] = None,
    advantage: Annotated[str | None, typer.Option(help="grpo")] = None,
    replay: Annotated[bool, typer.Option("--replay", help="Replay payloads too.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Also a line for what is left out, and why.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many rows.")] = None,
    cursor: Annotated[
        str | None, typer.Option(help="Go on behind an earlier export, or behind one of its rows.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="FILE may be there already.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew instead of resuming.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Export rows. After an interruption, run the same command again; FILE appears when it is complete."""
    switches = {"replay": replay, "explain": explain}
    wish = {
        "format": format,
        "shape": shape,
        "session_id": session,
        "group_id": group,
        "status": status,
        "session_status": session_status,
        "since": since,
        "until": until,
        "min_reward": min_reward,
        "max_reward": max_reward,
        "max_staleness": max_staleness,
        "weight_version": weight_version,
        "max_seq_len": max_seq_len,
        "truncate": truncate,
        "advantage": advantage,
        **{name: "true" if wanted else None for name, wanted in switches.items()},
        "limit": limit,
        "cursor": cursor,
    }
    given = {name: value for name, value in wish.items() if value is not None}
    server, for_machine = remote(ctx, url, token), wants_json(ctx, as_json)
    if file is not None:
        _to_file(server, given, file, overwrite=overwrite, restart=restart, for_machine=for_machine)
    elif for_machine or overwrite or restart:
        raise Usage("--json, --overwrite and --restart are for an export to a file")
    else:
        _to_output(server, given)


def _to_file(
    server: Transport, wish: dict[str, Any], file: Path, *, overwrite: bool, restart: bool, for_machine: bool
) -> None:
    from turnlog.cli.download import Download
    from turnlog.cli.output import machine, size

    download = Download(server, wish, file, overwrite=overwrite)
    try:
        made = download.run(restart=restart)
    except Unreachable as error:
        raise Failure(f"{error}{KEPT if download.has_begun else ''}") from None
    except KeyboardInterrupt:
        raise Failure(f"interrupted{KEPT if download.has_begun else ''}", INTERRUPTED) from None
    if for_machine:
        machine(made)
        return
    rows = "" if made["rows"] is None else f"{made['rows']} rows, "
    say(f"{file}: {rows}{size(made['bytes'])}")
    if made["next_cursor"] is not None:
        say(f"what changes from now on: --cursor {made['next_cursor']}")


def _to_output(server: Transport, wish: dict[str, Any]) -> None:
    """The bytes as they arrive; if the reader closes the pipe, the export ends."""
    if sys.stdout.isatty() and wish["format"] in ("parquet", "safetensors", "msgpack"):
        raise Usage(f"{wish['format']} is not for a terminal: name a file, or redirect")
    out = sys.stdout.buffer
    with server.stream("/export", wish) as response:
        for piece in response.iter_bytes():
            out.write(piece)
        out.flush()
