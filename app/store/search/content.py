"""Reads what is to be indexed: the wire frames of turns of many sessions, and the metadata of sessions, at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Integer, Table, TextClause, column, text

from app.store.schema import blobs, turns
from workers import codec

Key = tuple[str, int]
"""A session, and the number of a turn or of a blob."""

FEW, MANY = 8, 128
"""Keys of a statement. There are no other sizes, so that none is compiled twice."""

_NO_KEY: Key = ("", 0)


def wires(connection: Connection, wanted: Collection[Key]) -> Mapping[Key, bytes | None]:
    """Wire frames of turns; those are missing that are not in the database."""
    return {(row[0], row[1]): row[2] for row in _rows(connection, turns, "turn", "wire", wanted)}


def raw_blobs(connection: Connection, wanted: Collection[Key]) -> Mapping[Key, bytes]:
    """Blobs of sessions; those are missing that are not in the database. Raises CorruptContent."""
    return {(row[0], row[1]): codec.decompress(row[2]) for row in _rows(connection, blobs, "number", "data", wanted)}


def wire_sizes(connection: Connection, wanted: Collection[Key]) -> Mapping[Key, int]:
    """Bytes of the wire frames of turns, which are not read; as `wires`."""
    return _sizes(_rows(connection, turns, "turn", "wire", wanted, "length"))


def blob_sizes(connection: Connection, wanted: Collection[Key]) -> Mapping[Key, int]:
    """Bytes of blobs as they are stored, which are not read; as `raw_blobs`."""
    return _sizes(_rows(connection, blobs, "number", "data", wanted, "length"))


def _sizes(rows: Iterable[Sequence[Any]]) -> dict[Key, int]:
    return {(row[0], row[1]): row[2] or 0 for row in rows}


def _rows(
    connection: Connection, table: Table, number: str, data: str, wanted: Collection[Key], function: str = ""
) -> Iterator[Sequence[Any]]:
    """`function`: what the database makes of the data."""
    keys = sorted(wanted)
    for at in range(0, len(keys), MANY):
        part = keys[at : at + MANY]
        size = FEW if len(part) <= FEW else MANY
        given: dict[str, Any] = {}
        for place, (session_id, of) in enumerate(part + [_NO_KEY] * (size - len(part))):
            given |= {f"sid{place}": session_id, f"number{place}": of}
        statement = _by_keys(table.name, number, data, size, function)
        value = column("value", Integer) if function else table.c[data]
        yield from connection.execute(statement.columns(table.c.session_id, table.c[number], value), given)


@lru_cache
def _by_keys(table: str, number: str, data: str, size: int, function: str) -> TextClause:
    """Rows by pairs of keys, from the pairs on: SQLite reads the whole table for a list of pairs after IN."""
    pairs = ", ".join(f"(CAST(:sid{place} AS text), CAST(:number{place} AS bigint))" for place in range(size))
    return text(
        f"WITH wanted (session_id, number) AS (VALUES {pairs}) "
        f"SELECT {table}.session_id, {table}.{number}, {function}({table}.{data}) FROM wanted CROSS JOIN {table} "
        f"WHERE {table}.session_id = wanted.session_id AND {table}.{number} = wanted.number"
    )
