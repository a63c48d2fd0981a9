"""The Parquet file of an archive: it is read by later versions, which have more columns."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Table

from app.store.archives.format import TABLES, ArchivedSession
from app.store.archives.parquet import decode_group, encode
from app.store.schema import events, sessions


def row_of(table: Table, **values: Any) -> dict[str, Any]:
    return {column.name: None for column in table.columns if column.name != "session_id"} | values


EVENT = row_of(events, seq=1, type="SessionCreated", version=1, at=1.0, data=b"{}", tx=7, position=3)
SESSION = ArchivedSession(
    row_of(sessions, session_id="s", status="closed", note="kept"),
    {table.name: [EVENT] if table is events else [] for table in TABLES},
)


def without(body: bytes, column: str, field: str) -> bytes:
    """The file as a version wrote it that did not know a column of the heads and one of the events."""
    found = pq.read_table(io.BytesIO(body))
    rows = [
        {**row, "events_rows": [{name: value for name, value in event.items() if name != field} for event in events]}
        for row in found.drop_columns([column]).to_pylist()
        for events in [row["events_rows"]]
    ]
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def test_a_file_is_what_was_put_into_it() -> None:
    [found] = decode_group(io.BytesIO(encode([[SESSION]])), 0)
    assert found == SESSION


def test_a_file_of_an_earlier_version_lacks_columns() -> None:
    [found] = decode_group(io.BytesIO(without(encode([[SESSION]]), "note", "tx")), 0)
    assert found.head == {**SESSION.head, "note": None}
    assert found.rows[events.name] == [{**EVENT, "tx": None}]
