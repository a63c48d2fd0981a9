"""Pages of an SQLite file at rest: which of them hold what, and what becomes of a store when some are overwritten."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

PAGE_BYTES = 4096

How = Literal["zeros", "random", "flipped"]

HOWS: Sequence[How] = ("zeros", "random", "flipped")

NEEDED = ("sessions", "events", "turns", "blobs")
"""Tables that every export of a session needs; one with replay payloads needs its chunks too."""

Kept = dict[tuple[str, str], list[Any] | None]
"""By table and session its rows; None where the database cannot give them."""


class Page(NamedTuple):
    """`kind` is `leaf`, `internal` or `overflow`."""

    number: int
    name: str
    kind: str


def pages(path: Path, *names: str, kind: str = "leaf") -> list[Page]:
    """The pages of tables and indexes, but for their roots: without its root nothing of a table can be read."""
    query = (
        "SELECT pageno, name, pagetype FROM dbstat WHERE pagetype = ? AND pageno > 1 AND pageno NOT IN "
        "(SELECT rootpage FROM sqlite_master WHERE rootpage > 0) ORDER BY pageno"
    )
    with closing(_opened(path)) as connection:
        return [Page(*row) for row in connection.execute(query, (kind,)) if not names or row[1] in names]


def primary_key(path: Path, table: str) -> str:
    """The name of the index over a table's key."""
    with closing(_opened(path)) as connection:
        (name,) = connection.execute("SELECT name FROM pragma_index_list(?) WHERE origin = 'pk'", (table,)).fetchone()
    return str(name)


def root(path: Path, table: str) -> int:
    """The page without which nothing of a table can be read."""
    with closing(_opened(path)) as connection:
        (number,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    return int(number)


def overwrite(path: Path, numbers: Iterable[int], how: How, rng: random.Random) -> None:
    """`flipped` leaves a page's head as it is and changes some bytes of its cells."""
    with path.open("r+b") as file:
        for number in numbers:
            place = (number - 1) * PAGE_BYTES
            file.seek(place)
            page = bytearray(file.read(PAGE_BYTES))
            if how == "zeros":
                page = bytearray(PAGE_BYTES)
            elif how == "random":
                page = bytearray(rng.randbytes(PAGE_BYTES))
            else:
                for _ in range(40):
                    page[rng.randrange(PAGE_BYTES // 4, PAGE_BYTES)] ^= rng.randrange(1, 256)
            file.seek(place)
            file.write(page)


def kept(path: Path, session_ids: Iterable[str], tables: Sequence[str]) -> Kept:
    """What SQLite by itself gives of each session, each asked for alone, and behind an error on a new connection."""
    found: Kept = {}
    asked = iter([(table, session_id) for session_id in session_ids for table in tables])
    is_done = False
    while not is_done:
        with closing(_opened(path)) as connection:
            for table, session_id in asked:
                try:
                    query = f"SELECT * FROM {table} WHERE session_id = ?"
                    found[table, session_id] = sorted(connection.execute(query, (session_id,)), key=repr)
                except sqlite3.DatabaseError:
                    found[table, session_id] = None
                    break
            else:
                is_done = True
    return found


def lost(before: Kept, after: Kept, tables: Sequence[str]) -> set[str]:
    """The sessions of which something in these tables is not what it was."""
    return {
        session_id
        for (table, session_id), rows in before.items()
        if table in tables and after[table, session_id] != rows
    }


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
