"""Stored bytes that are no longer what was stored: a flipped bit or a lost end, in a place that a seed chooses."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from helpers.databases import connected
from helpers.looking import change
from sqlalchemy import text

from app.composition import metadata
from app.domain.events import CHECK_BYTES
from workers import codec
from workers.codec import CorruptContent

PLACES = (("turns", "tokens"), ("turns", "exchange"), ("blobs", "data"), ("chunks", "data"), ("events", "data"))
"""Tables and columns that hold bytes."""

LOG = ("turns tokens", "turns exchange", "events data")
"""What every export of a session needs."""


@dataclass(frozen=True)
class Damage:
    """One row's bytes, and what became of them; `key` names the row."""

    url: str
    table: str
    column: str
    key: dict[str, Any]
    before: bytes
    after: bytes

    @property
    def session_id(self) -> str:
        found: str = self.key["session_id"]
        return found

    @property
    def place(self) -> str:
        return f"{self.table} {self.column}"

    @property
    def is_harmless(self) -> bool:
        """Do the bytes still say what they said? A frame has bits that say nothing, an event may lose its checksum."""
        if self.table == "events":
            return self.after == self.before[: -1 - CHECK_BYTES]
        if self.place in LOG:
            return False
        try:
            return codec.decompress(self.after) == codec.decompress(self.before)
        except CorruptContent:
            return False

    def do(self) -> None:
        self._write(self.after)

    def undo(self) -> None:
        self._write(self.before)

    def _write(self, data: bytes) -> None:
        where = " AND ".join(f"{name} = :{name}" for name in self.key)
        statement = f"UPDATE {self.table} SET {self.column} = :content WHERE {where}"
        assert change(self.url, statement, content=data, **self.key) == 1


def choose(url: str, rng: random.Random, place: tuple[str, str]) -> Damage:
    """A row of one of PLACES, and what happens to it."""
    table, column = place
    names = [one.name for one in metadata().tables[table].primary_key.columns]
    row = rng.choice(_rows(url, f"SELECT {', '.join(names)}, {column} FROM {table} WHERE {column} IS NOT NULL"))
    before = bytes(row[-1])
    return Damage(url, table, column, dict(zip(names, row[:-1], strict=True)), before, damaged(before, rng))


def _rows(url: str, query: str) -> list[tuple[Any, ...]]:
    async def read() -> list[tuple[Any, ...]]:
        async with connected(url) as connection:
            found = [tuple(row) for row in await connection.execute(text(query))]
        return sorted(found)

    return asyncio.run(read())


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One bit flipped, or the end cut off."""
    if rng.random() < 0.25:
        return data[: rng.randrange(len(data))]
    return flipped(data, rng.randrange(8 * len(data)))


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
