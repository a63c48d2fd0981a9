"""Whole exports, to the byte: what they were when `export_digests.json` was made, also when helpers make the parts.

cd tests && python -m compat.test_export_bytes    # makes the digests anew, after an intended change
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from helpers.databases import migrate

from app.export.exporter import Exporter
from app.export.formats import CONTAINERS, DOCUMENTS, SHAPES
from app.export.helpers import Helpers
from app.export.query import ExportQuery
from app.store.engine import Database
from workers.pool import Pool

DIGESTS = Path(__file__).parent / "export_digests.json"
STORE = "turnlog.db"
ARCHIVE = Path(__file__).parent / "stores" / "d7078c7.tar.xz"

QUERIES: tuple[dict[str, Any], ...] = (
    *({"format": format, "shape": shape} for format in CONTAINERS for shape in SHAPES),
    *({"format": format} for format in DOCUMENTS),
    *({"format": format, "replay": True, "explain": True} for format in CONTAINERS),
    *({"format": format, "shape": "miles", "replay": True} for format in CONTAINERS),
    *({"format": format, "shape": "atropos", "advantage": "grpo", "explain": True} for format in CONTAINERS),
    *({"format": format, "max_seq_len": 40, "truncate": "token", "explain": True} for format in CONTAINERS),
    {"branches": "all", "loss": "every", "explain": True},
    {"limit": 7},
    {"status": "aborted", "explain": True},
)

Queries = Sequence[dict[str, Any]]

SOME_BYTES = 50_000
"""Stored content of a part: the store has many then."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return store_in(tmp_path_factory.mktemp("store"))


def store_in(folder: Path) -> str:
    with tarfile.open(ARCHIVE, "r:xz") as archive:
        archive.extract(STORE, folder, filter="data")
    found = f"sqlite+aiosqlite:///{folder / STORE}"
    migrate(found)
    return found


async def exported(database: Database, query: dict[str, Any], helpers: Helpers | None = None) -> bytes:
    started = await Exporter(database, "test", helpers=helpers).start(ExportQuery(**query), None)
    return b"".join([piece async for piece in started.pieces])


async def digests(url: str, queries: Queries) -> dict[str, str]:
    async with opened(url) as database:
        return {json.dumps(query): digest(query, await exported(database, query)) for query in queries}


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Database]:
    database = Database(url)
    try:
        yield database
    finally:
        await database.close()


def digest(query: dict[str, Any], content: bytes) -> str:
    """Of Parquet without what its library writes in its own way: its version is in each file."""
    if query.get("format") == "parquet":
        content = "\n".join(_parquet(content)).encode()
    return hashlib.sha256(content).hexdigest()


def _parquet(content: bytes) -> Iterator[str]:
    file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content))
    yield str(file.schema_arrow)
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        columns = [group.column(column) for column in range(group.num_columns)]
        yield str([(one.path_in_schema, one.num_values, one.compression, sorted(one.encodings)) for one in columns])
        yield repr(file.read_row_group(number).to_pylist())


some_and_all = pytest.mark.parametrize(
    "queries", [pytest.param(QUERIES[::4], id="some"), pytest.param(QUERIES, id="all", marks=pytest.mark.long)]
)


@some_and_all
def test_exports_are_what_they_were(url: str, queries: Queries) -> None:
    expected = json.loads(DIGESTS.read_text())
    assert len(expected) == len(QUERIES)
    assert asyncio.run(digests(url, queries)) == {json.dumps(query): expected[json.dumps(query)] for query in queries}


@some_and_all
def test_helpers_make_the_same_bytes(url: str, queries: Queries) -> None:
    async def compare() -> int:
        async with opened(url) as database, lent(deadline_s=60) as (helpers, pool):
            for query in queries:
                assert await exported(database, query, helpers) == await exported(database, query), query
            return pool.counters().jobs

    assert asyncio.run(compare()) > len(queries)


def test_a_helper_that_is_killed_costs_no_row(url: str) -> None:
    async def compare() -> int:
        async with opened(url) as database, lent(deadline_s=0.001) as (helpers, pool):
            assert await exported(database, {}, helpers) == await exported(database, {})
            while not pool.counters().crashes:
                await asyncio.sleep(0.01)
            return pool.counters().jobs

    assert asyncio.run(compare()) == 0


@asynccontextmanager
async def lent(deadline_s: float) -> AsyncIterator[tuple[Helpers, Pool]]:
    """A helper that is ready, for exports whose parts are small."""
    helpers = Helpers(1, deadline_s=deadline_s, memory_bytes=2 << 30, local_parts=0, part_bytes=SOME_BYTES)
    async with helpers.lent() as pool:
        while not pool.counters().alive:
            await asyncio.sleep(0.01)
        yield helpers, pool


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        DIGESTS.write_text(json.dumps(asyncio.run(digests(store_in(Path(name)), QUERIES)), indent=1) + "\n")
