"""`turnlog export`: training rows to standard output, or to a file that appears only when it is complete."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from turnlog.amounts import amount
from turnlog.cli.parameters import given, takes
from turnlog.cli.remote import remote
from turnlog.cli.running import INTERRUPTED, Failure, UsageError, say, wants_json
from turnlog.errors import Unreachable
from turnlog.parameters import ExportParameters

if TYPE_CHECKING:
    from turnlog.client._sync.transport import Transport

KEPT = "; what has come is kept, the same command goes on from there"


STANDARD_OUTPUT = Path("-")

BINARY = ("parquet", "safetensors", "msgpack")

SUFFIXES = tuple(f".{name}" for name in BINARY)
"""Of files that would mislead their readers if they held lines of JSON."""


@takes(ExportParameters, "url_s")  # only a program has a use for a URL's duration
def export(
    ctx: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="The file to make; none, or -: standard output.")] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="ndjson, parquet, safetensors, msgpack, atif, messages; none: as FILE's name ends, else ndjson."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="FILE may be there already.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew instead of resuming.")] = False,
    **parameters: Any,
) -> None:
    """Export rows. After an interruption, run the same command again; FILE appears when it is complete."""
    if format is None:
        format = file.suffix[1:] if file is not None and file.suffix in SUFFIXES else "ndjson"
    wish = {"format": format, "shape": "turnlog", **given(parameters)}
    server, for_machine = remote(ctx), wants_json(ctx)
    if file is not None and file != STANDARD_OUTPUT:
        _to_file(server, wish, file, overwrite=overwrite, restart=restart, for_machine=for_machine)
    elif for_machine or overwrite or restart:
        raise UsageError("--json, --overwrite and --restart require FILE")
    else:
        _to_output(server, wish)


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
    rows = "" if made["rows"] is None else f"{amount(made['rows'], 'row')}, "
    say(f"{file}: {rows}{size(made['bytes'])}")
    if download.is_empty:
        _say_nothing(wish)
    with file.open("rb") as lines:
        _say_cut(wish, lines if wish.get("max_seq_len") and wish.get("explain") else ())
    if made["next_cursor"] is not None:
        say(f"what changes from now on: --cursor {made['next_cursor']}")


def _to_output(server: Transport, wish: dict[str, Any]) -> None:
    """The bytes as they arrive; if the reader closes the pipe, the export ends."""
    if sys.stdout.isatty() and wish["format"] in BINARY:
        raise UsageError(f"{wish['format']} is not for a terminal: name a file, or redirect")
    out = sys.stdout.buffer
    with server.stream("/export", wish) as response:
        is_empty = "x-turnlog-empty" in response.headers
        _say_cut(wish, _printed(out, response.iter_raw()))
    if is_empty:
        _say_nothing(wish)


def _printed(out: BinaryIO, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of what is printed meanwhile."""
    begun: list[bytes] = []
    for piece in pieces:
        out.write(piece)
        first, *lines = piece.split(b"\n")
        begun.append(first)
        for line in lines:
            yield b"".join(begun)
            begun = [line]
    out.flush()


def _say_nothing(wish: dict[str, Any]) -> None:
    say("no row matches" + ("" if wish.get("explain") else "; --explain says what was left out, and why"))


def _say_cut(wish: dict[str, Any], lines: Iterable[bytes]) -> None:
    """The sum of the sampled tokens that --max-seq-len took; the lines are read to their end."""
    cut = 0
    for line in lines:
        if b'"cut_tokens":' in line and "excluded" in (row := json.loads(line)):
            cut += row.get("cut_tokens", 0)
    if cut:
        say(f"{amount(cut, 'sampled token')} cut by --max-seq-len {wish['max_seq_len']}")
    elif wish.get("max_seq_len") and not wish.get("explain"):
        say("--explain says how many sampled tokens --max-seq-len cuts")
    elif wish.get("max_seq_len") and wish["format"] in BINARY:
        say("the column cut_tokens says how many sampled tokens --max-seq-len cuts")
