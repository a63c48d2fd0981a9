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
from turnlog.errors import TurnlogError, Unreachable
from turnlog.parameters import ExportParameters

if TYPE_CHECKING:
    from turnlog.client._sync.transport import Transport

KEPT = "; what has arrived is kept, the same command continues from there"

QUICK_S = 2
"""How long the server may look for something that was left out where nobody asked what was."""

STANDARD_OUTPUT = Path("-")

BINARY = ("parquet", "safetensors", "msgpack")

LeftOut = dict[str, dict[str, int]]
"""By reason, how many `lines` say that something was left out, and their `lost_tokens`."""

SUFFIXES = tuple(f".{name}" for name in BINARY)
"""Of files that would mislead their readers if they held lines of JSON."""


@takes(ExportParameters, "url_s")  # only a program has a use for a URL's duration
def export(
    ctx: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="The file to write; default, or -: standard output.")] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="ndjson, parquet, safetensors, msgpack, atif, messages; default: by FILE's suffix, else ndjson."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Start over instead of resuming.")] = False,
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
    left_out: LeftOut = {}
    if wish.get("explain"):
        with file.open("rb") as lines:
            left_out = _by_reason(_asked(server, wish, made["cursor"]) if wish["format"] in BINARY else lines)
    if for_machine:
        machine(made | ({"left_out": left_out} if wish.get("explain") else {}))
        return
    rows = "" if made["rows"] is None else f"{amount(made['rows'], 'row')}, "
    say(f"{file}: {rows}{size(made['bytes'])}")
    _say_left_out(server, wish, made["cursor"], left_out, is_empty=download.is_empty)
    if made["next_cursor"] is not None:
        say(f"for later changes: --cursor {made['next_cursor']}")


def _to_output(server: Transport, wish: dict[str, Any]) -> None:
    """The bytes as they arrive; if the reader closes the pipe, the export ends."""
    is_binary = wish["format"] in BINARY
    if sys.stdout.isatty() and is_binary:
        raise UsageError(f"{wish['format']} cannot be shown on a terminal: name a file, or redirect")
    with server.stream("/export", wish) as response:
        is_empty, cursor = "x-turnlog-empty" in response.headers, response.headers["x-turnlog-cursor"]
        if is_binary:
            sys.stdout.buffer.writelines(response.iter_raw())
        else:
            left_out = _by_reason(_lines(response.iter_raw(), sys.stdout.buffer))
        sys.stdout.buffer.flush()
    if is_binary:
        left_out = _by_reason(_asked(server, wish, cursor))
    _say_left_out(server, wish, cursor, left_out, is_empty=is_empty)


def _lines(pieces: Iterable[bytes], out: BinaryIO | None = None) -> Iterator[bytes]:
    """Lines, which end at a line feed alone. They are printed to `out` meanwhile."""
    begun: list[bytes] = []
    for piece in pieces:
        if out is not None:
            out.write(piece)
        first, *lines = piece.split(b"\n")
        begun.append(first)
        for line in lines:
            yield b"".join(begun)
            begun = [line]


def _asked(server: Transport, wish: dict[str, Any], cursor: str) -> Iterator[bytes]:
    """The lines of what an export in a format without lines left out: a second request gives them alone, but not those
    of a part, which has a limit."""
    if wish.get("explain") and "limit" not in wish:
        asked = {**wish, "format": "ndjson", "explain": "only", "cursor": cursor}
        with server.stream("/export", asked) as response:
            yield from _lines(response.iter_raw())


def _by_reason(lines: Iterable[bytes]) -> LeftOut:
    """What the lines say was left out; they are read to their end."""
    reasons: LeftOut = {}
    for line in lines:
        if b'"lost_tokens":' in line and "excluded" in (row := json.loads(line)):
            told = reasons.setdefault(row["excluded"].partition(": ")[0], {"lines": 0, "lost_tokens": 0})
            told["lines"] += 1
            told["lost_tokens"] += row["lost_tokens"] or 0
    return dict(sorted(reasons.items(), key=lambda one: (-one[1]["lost_tokens"], -one[1]["lines"])))


def _say_left_out(server: Transport, wish: dict[str, Any], cursor: str, left_out: LeftOut, *, is_empty: bool) -> None:
    """What was left out, by reason; without --explain, how to learn it, where something was."""
    if left_out:
        lost = sum(told["lost_tokens"] for told in left_out.values())
        say(f"left out or cut: {amount(lost, 'sampled token')}")
    for reason, told in left_out.items():
        say(f"  {reason}: {amount(told['lost_tokens'], 'sampled token')}, {amount(told['lines'], 'line')}")
    hint = "; --explain says what was left out, and why" if not left_out and _has_left_out(server, wish, cursor) else ""
    if is_empty:
        say(f"no row matches{hint}")
    elif hint:
        say(hint.removeprefix("; "))


def _has_left_out(server: Transport, wish: dict[str, Any], cursor: str) -> bool:
    """Does the whole export leave anything out, as far as the server finds out quickly?"""
    if wish.get("explain") or "limit" in wish:
        return False
    asked = {**wish, "explain": "only", "limit": 1, "cursor": cursor}
    try:
        with server.stream("/export", asked, silence_s=QUICK_S) as response:
            return "x-turnlog-empty" not in response.headers
    except TurnlogError:  # the export itself has come
        return False
