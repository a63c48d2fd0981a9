"""An archive's sessions as Parquet: a row for each, with its head's columns, and its rows of each table as a list (in
`events_rows`, `turns_rows`, …).

A file of an earlier version lacks the columns that were added since; they are null, as in rows that a migration found.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from sqlalchemy import Boolean, Column, Double, Integer, LargeBinary, Table

from app.store.archives.format import TABLES, ArchivedRows, ArchivedSession
from app.store.schema import events, sessions
from workers.codec import CorruptContent


def encode(groups: Iterable[Sequence[ArchivedSession]]) -> bytes:
    """A file with these row groups. Raises CorruptContent for rows that no version wrote."""
    out = io.BytesIO()
    with pq.ParquetWriter(out, _SCHEMA, compression="zstd", use_dictionary=False, write_page_checksum=True) as writer:
        for group in groups:
            rows = [{**one.head, **{_list_of(table): one.rows[table.name] for table in TABLES}} for one in group]
            try:
                table = pa.Table.from_pylist(rows, _SCHEMA)
            except pa.ArrowException as error:  # its message shows the row
                raise CorruptContent(f"a row that no version wrote: {type(error).__name__}") from None
            writer.write_table(table, row_group_size=len(rows))
    return out.getvalue()


def decode_group(file: BinaryIO, row_group: int) -> list[ArchivedSession]:
    """The sessions of a row group. Raises CorruptContent."""
    with _readable(file) as found:
        rows = found.read_row_group(row_group).to_pylist()
    return [ArchivedSession({name: row.get(name) for name in _HEAD}, _rows_of(row)) for row in rows]


def session_ids(file: BinaryIO) -> list[str]:
    """All sessions of a file. Raises CorruptContent."""
    with _readable(file) as found:
        ids: list[str] = found.read(["session_id"])["session_id"].to_pylist()
    return ids


def rows_without(samples: BinaryIO, session_ids: Collection[str]) -> bytes:
    """A file of training rows without those of these sessions. Raises CorruptContent."""
    out = io.BytesIO()
    with _readable(samples) as found, pq.ParquetWriter(out, found.schema_arrow, compression="zstd") as writer:
        for number in range(found.num_row_groups):
            rows = found.read_row_group(number)
            keep = pc.invert(pc.is_in(rows["session_id"], pa.array(sorted(session_ids), pa.string())))
            writer.write_table(rows.filter(keep))
    return out.getvalue()


@contextmanager
def _readable(file: BinaryIO) -> Iterator[pq.ParquetFile]:
    """The file, read with its checksums. Raises CorruptContent."""
    try:
        yield pq.ParquetFile(file, page_checksum_verification=True, pre_buffer=True)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise CorruptContent(f"an archive cannot be read: {type(error).__name__}") from error


def _rows_of(row: dict[str, Any]) -> ArchivedRows:
    return {table.name: _decoded(table, row[_list_of(table)]) for table in TABLES}


def _list_of(table: Table) -> str:
    return f"{table.name}_rows"


def _decoded(table: Table, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises CorruptContent for a column that a later version has added."""
    names = _names(table)
    if rows and (unknown := rows[0].keys() - set(names)):
        raise CorruptContent(f"an archive of a later version: {table.name} has {', '.join(sorted(unknown))}")
    whole: list[dict[str, Any]] = [{name: row.get(name) for name in names} for row in rows]
    return [{**row, "data": row["data"].encode()} for row in whole] if table is events else whole


def _names(table: Table) -> list[str]:
    return [column.name for column in table.columns if column.name != "session_id"]


def _type_of(column: Column[Any]) -> pa.DataType:
    match column.type:
        case LargeBinary():
            return pa.string() if column.table is events else pa.binary()
        case Integer():
            return pa.int64()
        case Double():
            return pa.float64()
        case Boolean():
            return pa.bool_()
        case _:
            return pa.string()


def _fields(columns: Iterable[Column[Any]]) -> list[pa.Field]:
    return [pa.field(column.name, _type_of(column)) for column in columns]


_HEAD = [column.name for column in sessions.columns]
_SCHEMA = pa.schema(
    [
        *_fields(sessions.columns),
        *(
            pa.field(_list_of(table), pa.list_(pa.struct(_fields(table.columns[name] for name in _names(table)))))
            for table in TABLES
        ),
    ]
)
