"""The file: one row a session, complete, and useful as it is.

    rollout_id              the root of the rollout that it belongs to
    columns of the head     session_id, group_id, reward, status, turns, created_at, closed_at, …
    metadata                the session's metadata, as JSON
    samples                 its training rows as `/export?format=parquet` gives them: tokens, loss_mask, logprobs,
                            messages, …
    events_rows, turns_rows, blobs_rows, chunks_rows, annotation_columns_rows, refused_replies_rows
                            its rows in the database, to the byte: what an import writes
    feed                    the row of its group in the training feed

A rollout's sessions are in one row group.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Boolean, Column, Double, Integer, LargeBinary, Table

from app.export import formats
from app.export.query import ExportQuery
from app.export.row import Fields
from app.features.archive.rows import CONTENT, LARGEST_BYTES, LARGEST_EVENTS, Rollout, StoredRows
from app.features.groups.schema import groups
from app.store.schema import blobs, events, sessions
from workers import codec
from workers.codec import CorruptContent

FORMAT = b"1"
_KEY = b"turnlog.archive"

GROUP_BYTES = 4 << 20
"""Bytes of a row group, about: a reader holds one in memory."""

MOST_FILE = 1 << 30
"""Bytes of a file: content of FILE_BYTES and a largest rollout, and its samples."""

MOST_GROUP = LARGEST_BYTES + LARGEST_EVENTS + (64 << 20)
"""Bytes of a row group's own columns, unpacked."""

_EVENT_DATA = f"{events.name}_rows.list.element.data"


def encode(rollouts: Sequence[Rollout], samples: Sequence[Fields]) -> bytes:
    """A file. `samples` are export rows of any of the sessions. Raises CorruptContent for rows that do not fit."""
    rows = _samples(samples)
    schema = pa.schema([*_SCHEMA, pa.field("samples", pa.list_(pa.struct(list(rows.schema))))], {_KEY: FORMAT})
    places: dict[str, list[int]] = {}
    for at, session_id in enumerate(rows["session_id"].to_pylist()):
        places.setdefault(session_id, []).append(at)
    out = io.BytesIO()
    with _writer(out, schema) as writer:
        for group in _groups(rollouts):
            listed = [(rollout, session) for rollout in group for session in rollout.sessions]
            try:
                table = pa.Table.from_pylist([_row(rollout, session) for rollout, session in listed], _SCHEMA)
            except pa.ArrowException as error:  # its message shows the row
                raise CorruptContent(f"a row that no version wrote: {type(error).__name__}") from None
            own = [places.get(session.session_id, []) for _, session in listed]
            taken = rows.take(pa.array([at for part in own for at in part], pa.int64())).combine_chunks()
            offsets = [0]
            for part in own:
                offsets.append(offsets[-1] + len(part))
            values = pa.StructArray.from_arrays(
                [column.combine_chunks() for column in taken.columns], fields=list(rows.schema)
            )
            lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
            writer.write_table(table.append_column(schema.field("samples"), lists), row_group_size=len(listed))
    return out.getvalue()


def unpacked_bytes(body: bytes) -> int:
    """How many bytes the largest row group unpacks to, as its head says. Raises CorruptContent for more than this
    version writes, and for columns of other types or encodings: of a dictionary, a few bytes could be read many
    times."""
    with _readable(body) as file:
        for field in _SCHEMA:
            at = file.schema_arrow.get_field_index(field.name)
            if at < 0 or file.schema_arrow.field(at).type != field.type:
                raise CorruptContent(f"the file's column {field.name} differs from what this version writes")
        return max((_group_bytes(file.metadata.row_group(at)) for at in range(file.num_row_groups)), default=0)


def _group_bytes(group: pq.RowGroupMetaData) -> int:
    size = 0
    for at in range(group.num_columns):
        column = group.column(at)
        if column.path_in_schema.partition(".")[0] not in _SCHEMA.names:
            continue
        if column.has_dictionary_page:
            raise CorruptContent("the file has an encoding that no version writes")
        size += column.total_uncompressed_size
        if column.path_in_schema == _EVENT_DATA and column.total_uncompressed_size > LARGEST_EVENTS + GROUP_BYTES:
            raise CorruptContent(f"the events of a row group have {column.total_uncompressed_size} bytes")
    if size > MOST_GROUP:
        raise CorruptContent(f"a row group unpacks to {size} bytes")
    return size


def decode(body: bytes) -> Iterator[list[Rollout]]:
    """The rollouts, a row group at a time. Raises CorruptContent."""
    with _readable(body) as file:
        for number in range(file.num_row_groups):
            try:
                rows = file.read_row_group(number, _SCHEMA.names).to_pylist()
            except (pa.ArrowException, OSError, KeyError, ValueError) as error:
                raise CorruptContent(f"the file cannot be read: {type(error).__name__}") from error
            rollouts: dict[str, list[StoredRows]] = {}
            for row in rows:
                rollouts.setdefault(row["rollout_id"], []).append(_stored(row))
            yield [Rollout(root_id, members) for root_id, members in rollouts.items()]


def without(body: bytes, erased: frozenset[str]) -> bytes:
    """The file without some sessions. Raises CorruptContent."""
    out = io.BytesIO()
    with _readable(body) as file, _writer(out, file.schema_arrow) as writer:
        for number in range(file.num_row_groups):
            rows = file.read_row_group(number)
            rows = rows.filter(pa.array([one not in erased for one in rows["session_id"].to_pylist()], pa.bool_()))
            if rows.num_rows:
                writer.write_table(rows, row_group_size=rows.num_rows)
    return out.getvalue()


def _readable(body: bytes) -> pq.ParquetFile:
    """Raises CorruptContent."""
    try:
        file = pq.ParquetFile(io.BytesIO(body), page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptContent(f"the file cannot be read: {type(error).__name__}") from error
    metadata = (file.schema_arrow.metadata or {}).get(_KEY)
    if metadata != FORMAT:
        raise CorruptContent("the file is not an archive" if metadata is None else "another version wrote the file")
    return file


def _writer(out: io.BytesIO, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(out, schema, compression="zstd", use_dictionary=False, write_page_checksum=True)


def _groups(rollouts: Sequence[Rollout]) -> Iterator[list[Rollout]]:
    group: list[Rollout] = []
    size = 0
    for rollout in rollouts:
        group.append(rollout)
        size += rollout.size
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _samples(rows: Sequence[Fields]) -> pa.Table:
    writer = formats.open_writer(ExportQuery(format="parquet"))
    try:
        return pq.read_table(io.BytesIO(b"".join([*writer.write(rows), *writer.finish()])))
    finally:
        writer.close()


def _row(rollout: Rollout, session: StoredRows) -> dict[str, Any]:
    metadata = next((row["data"] for row in session.rows[blobs.name] if row["kind"] == "metadata"), None)
    text = None if metadata is None else codec.decompress(metadata).decode()
    lists = {_list_of(table): session.rows[table.name] for table in CONTENT}
    return {"rollout_id": rollout.root_id, **session.head, "metadata": text, "feed": session.feed, **lists}


def _stored(row: Mapping[str, Any]) -> StoredRows:
    content = {table.name: row[_list_of(table)] or [] for table in CONTENT}
    if any(one is None for rows in content.values() for one in rows):
        raise CorruptContent("a row is missing")
    content[events.name] = [{**event, "data": (event["data"] or "").encode()} for event in content[events.name]]
    return StoredRows({column.name: row[column.name] for column in sessions.columns}, row["feed"], content)


def _type(column: Column[Any]) -> pa.DataType:
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
    return [pa.field(column.name, _type(column)) for column in columns]


def _list_of(table: Table) -> str:
    return f"{table.name}_rows"


_SCHEMA = pa.schema(
    [
        pa.field("rollout_id", pa.string()),
        *_fields(sessions.columns),
        pa.field("metadata", pa.string()),
        pa.field("feed", pa.struct(_fields(groups.columns))),
        *(pa.field(_list_of(table), pa.list_(pa.struct(_fields(columns)))) for table, columns in CONTENT.items()),
    ]
)
