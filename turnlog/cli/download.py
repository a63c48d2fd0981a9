"""Downloads an export into a file, and resumes it after an interruption.

FILE.partial         what has been received
FILE.partial.json    the parameters, and the cursor of the export's window: the same cursor gives the same bytes

Formats of lines are resumed after the last complete row, by its own cursor. Other formats are requested again from the
window's beginning; what is on disk is compared instead of written. If it differs (something was erased, tombstoned or
rewarded meanwhile), the file begins anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from turnlog.cli.output import console
from turnlog.cli.running import Failure

if TYPE_CHECKING:
    import httpx

    from turnlog.client._sync.transport import Transport

BLOCK = 1 << 20

LINES = ("ndjson", "atif", "messages")
"""Formats with one row per line."""


class _Changed(Exception):
    """The server's bytes differ from those before the interruption."""


class _Begun(NamedTuple):
    """The part of the export on disk: its size, its rows, and the parameters for the rest."""

    size: int
    rows: int
    cursor: str | None
    skip: bool


class Download:
    """One file. `wish` are the parameters of `/export`."""

    def __init__(self, server: Transport, wish: Mapping[str, Any], file: Path, *, overwrite: bool) -> None:
        self._server = server
        self._wish = wish
        self._file = file
        self._overwrite = overwrite
        self._partial = file.with_name(f"{file.name}.partial")
        self._notes = file.with_name(f"{file.name}.partial.json")
        self._has_lines = wish["format"] in LINES
        self.is_empty = False

    def run(self, *, restart: bool) -> dict[str, Any]:
        """Download; returns a summary as a JSON object. Raises Failure, TurnlogError; the next run resumes what was
        received."""
        if self._file.exists() and not self._overwrite:
            raise Failure(f"{self._file} already exists: --overwrite replaces it once the export is complete")
        try:
            with self._partial.open("a+b") as out:
                self._claim(out)
                try:
                    done = self._filled(out, None if restart else self._noted())
                finally:
                    if not self.has_begun:
                        self._partial.unlink()
                os.replace(self._partial, self._file)
            self._notes.unlink()
            _sync(self._file.absolute().parent)
        except OSError as error:
            raise Failure(f"{error.filename or self._file}: {error.strerror}") from None
        return done

    def _filled(self, out: IO[bytes], notes: dict[str, Any] | None) -> dict[str, Any]:
        """The whole export is on disk."""
        try:
            done = self._fetch(out, notes)
        except _Changed:
            done = self._fetch(out, None)
        out.flush()
        os.fsync(out.fileno())
        return done

    @property
    def has_begun(self) -> bool:
        """Can the next run resume?"""
        return self._notes.exists()

    def _claim(self, out: IO[bytes]) -> None:
        """Lock the file against a second run; the kernel frees the lock with the process. Raises Failure."""
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure(f"another run is writing {self._partial}") from None
        if not self._partial.exists() or os.fstat(out.fileno()).st_ino != self._partial.stat().st_ino:
            raise Failure(f"another run has just completed {self._file}")

    def _noted(self) -> dict[str, Any] | None:
        """The state left by an earlier run of the same export. Raises Failure if it was another export."""
        try:
            notes = json.loads(self._notes.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            raise Failure(f"{self._notes} cannot be read: --restart starts over") from None
        if notes.get("url") != self._server.base_url or notes.get("wish") != dict(self._wish):
            raise Failure(f"{self._partial} is from an export with other parameters: --restart starts over")
        return dict(notes)

    def _fetch(self, out: IO[bytes], notes: dict[str, Any] | None) -> dict[str, Any]:
        """Raises _Changed if the bytes on disk are not the server's."""
        begun = _Begun(0, 0, None, skip=False) if notes is None else self._begun(out, notes)
        out.truncate(begun.size)
        wish = dict(self._wish)
        if begun.cursor is not None:
            wish["cursor"] = begun.cursor
        limit = wish.get("limit")
        if limit is not None and begun.rows and not begun.skip:
            if begun.rows >= limit:
                return self._made(out, begun.rows, notes or {}, None)
            wish["limit"] = limit - begun.rows
        with self._server.stream("/export", wish) as response:
            if notes is None:
                notes = self._note(response)
            self.is_empty = not begun.rows and "x-turnlog-empty" in response.headers
            rows = self._write(out, response, begun)
            return self._made(out, rows, notes, response.headers.get("x-turnlog-next-cursor"))

    def _begun(self, out: IO[bytes], notes: Mapping[str, Any]) -> _Begun:
        if not self._has_lines:
            return _Begun(os.fstat(out.fileno()).st_size, 0, notes["cursor"], skip=True)
        last, end, rows = b"", 0, 0
        out.seek(0)
        for line in out:
            if line.endswith(b"\n"):
                last, end, rows = line, end + len(line), rows + 1
        if not rows:
            return _Begun(0, 0, notes["cursor"], skip=False)
        behind = json.loads(last).get("cursor")
        if behind is None:
            return _Begun(end, rows, notes["cursor"], skip=True)
        return _Begun(end, rows, behind, skip=False)

    def _note(self, response: httpx.Response) -> dict[str, Any]:
        """Written before the first byte of the rows, which so always have a cursor."""
        notes = {"url": self._server.base_url, "wish": dict(self._wish), "cursor": response.headers["x-turnlog-cursor"]}
        unfinished = self._notes.with_name(f"{self._notes.name}.new")
        with unfinished.open("w") as file:
            json.dump(notes, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, self._notes)
        return notes

    def _write(self, out: IO[bytes], response: httpx.Response, begun: _Begun) -> int:
        """Receive the rest of the file; returns the number of lines of the whole. Raises _Changed."""
        pieces = response.iter_raw()
        rows = begun.rows
        with _progress(begun.size, rows if self._has_lines else None) as moved:
            if begun.skip:
                pieces = self._compared(out, pieces, begun.size)
            for piece in pieces:
                out.write(piece)
                rows += piece.count(b"\n") if self._has_lines else 0
                moved(len(piece), rows)
        return rows

    def _compared(self, out: IO[bytes], pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
        """The bytes after the first `size`, which must be the file's. Raises _Changed."""
        there, now, left = _digest(out, size), hashlib.sha256(), size
        for piece in pieces:
            known, rest = piece[:left], piece[left:]
            now.update(known)
            left -= len(known)
            if rest:
                if now.digest() != there:
                    raise _Changed
                yield rest
        if left or now.digest() != there:
            raise _Changed

    def _made(self, out: IO[bytes], rows: int, notes: Mapping[str, Any], following: str | None) -> dict[str, Any]:
        out.flush()
        return {
            "file": str(self._file),
            "bytes": os.fstat(out.fileno()).st_size,
            "rows": rows if self._has_lines else None,
            "cursor": notes.get("cursor"),
            "next_cursor": following,
        }


def _digest(file: IO[bytes], size: int) -> bytes:
    file.seek(0)
    found = hashlib.sha256()
    while size > 0 and (block := file.read(min(BLOCK, size))):
        found.update(block)
        size -= len(block)
    return found.digest()


def _sync(folder: Path) -> None:
    """Sync the folder, so that the new name is on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Moved:
    """Updates the progress bar. The total is unknown: the server makes rows as they are read."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def __call__(self, count: int, rows: int) -> None:
        self._bar.update(self._task, advance=count, rows=rows or "")


@contextmanager
def _progress(begun: int, rows: int | None) -> Iterator[_Moved]:
    """A progress bar if standard error is a terminal."""
    columns = (
        TextColumn("exporting"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[rows]} rows" if rows is not None else ""),
        TimeElapsedColumn(),
    )
    shown = sys.stderr.isatty()
    with Progress(*columns, console=console(errors=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("export", total=None, completed=begun, rows=rows or 0)
        yield _Moved(bar, task)
