"""The shapes and formats that there are, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import msgspec

from app.domain.samples import Segment, Status
from app.errors import InvalidRequest, Unsupported
from app.export.columns import Columns
from app.export.containers import lines
from app.export.containers.safetensors import SafetensorsWriter
from app.export.containers.writer import EXCLUDED as EXCLUDED
from app.export.containers.writer import EXCLUSION
from app.export.containers.writer import Writer as Writer
from app.export.row import Fields, Row, Shape, Unfit
from app.export.shapes import areal, atif, atropos, messages, miles, prime_rl, skyrl, slime, tinker, trl, turnlog, verl
from app.extras import install

GroupShape = Callable[[Sequence[Row]], Fields]
"""A row for all rows of a group. Raises Unfit."""


class Entry(msgspec.Struct, frozen=True):
    """How a shape's rows are made, one of a row, or one of a group's rows together, and what they hold.

    `last_status`: their status is the last turn's, not that of all turns.
    """

    columns: Columns
    of_row: Shape | None = None
    of_group: GroupShape | None = None
    last_status: bool = False


DEFAULT = "turnlog"

SHAPES: Mapping[str, Entry] = {
    "turnlog": Entry(turnlog.COLUMNS, turnlog.fields),
    "miles": Entry(miles.COLUMNS, miles.fields, last_status=True),
    "slime": Entry(slime.COLUMNS, slime.fields),
    "verl": Entry(verl.COLUMNS, verl.fields),
    "skyrl": Entry(skyrl.COLUMNS, skyrl.fields),
    "trl": Entry(trl.COLUMNS, trl.fields),
    "tinker": Entry(tinker.COLUMNS, tinker.fields),
    "areal": Entry(areal.COLUMNS, areal.fields),
    "prime-rl": Entry(prime_rl.COLUMNS, prime_rl.fields),
    "atropos": Entry(atropos.COLUMNS, of_group=atropos.group_fields),
}


def _parquet(columns: Columns) -> Writer:
    # pyarrow is heavy; a server that never writes Parquet never loads it.
    from app.export.containers.parquet import ParquetWriter

    return ParquetWriter(columns)


CONTAINERS: Mapping[str, Callable[[Columns], Writer]] = {
    "ndjson": lambda columns: lines.ndjson(),
    "parquet": _parquet,
    "safetensors": SafetensorsWriter,
    "msgpack": lambda columns: lines.msgpack(),
}
"""Formats that hold any shape."""

DOCUMENTS: Mapping[str, Entry] = {
    "atif": Entry(atif.COLUMNS, atif.fields),
    "messages": Entry(messages.COLUMNS, messages.fields),
}
"""Formats with a row of their own, one JSON object a line."""

FORMATS = (*CONTAINERS, *DOCUMENTS)


def require(format: str, shape: str) -> None:
    """Raises InvalidRequest for a format or shape that there is not, or both together, Unsupported without pyarrow."""
    if format not in FORMATS:
        raise InvalidRequest(f"format={format} is not one of {', '.join(FORMATS)}")
    if shape not in SHAPES:
        raise InvalidRequest(f"shape={shape} is not one of {', '.join(SHAPES)}")
    if format == "parquet" and find_spec("pyarrow") is None:
        raise Unsupported(f"format=parquet needs pyarrow on the server (turnlog[parquet]): {install('parquet')}")
    if format in DOCUMENTS and shape != DEFAULT:
        raise InvalidRequest(
            f"format={format} has rows of its own and takes no shape={shape}; formats that do: {', '.join(CONTAINERS)}"
        )


def takes_groups(shape: str) -> bool:
    """Is a row of this shape made of a whole group?"""
    return SHAPES[shape].of_group is not None


def status_of(format: str, shape: str, segment: Segment) -> Status:
    """What the shape's row of a segment will say."""
    return segment.last_status if _entry(format, shape).last_status else segment.status


def of_row(format: str, shape: str, row: Row) -> Fields:
    """Raises Unfit."""
    make = _entry(format, shape).of_row
    if make is None:
        raise ValueError(f"a row of shape {shape} is made of a whole group")
    if shape != DEFAULT and row.sample.response_length and not row.sample.loss_mask.any():
        raise Unfit("every sampled token is in another session's loss")
    return make(row)


def of_group(shape: str, rows: Sequence[Row]) -> Fields:
    """Raises Unfit."""
    make = SHAPES[shape].of_group
    if make is None:
        raise ValueError(f"a row of shape {shape} is made of one row")
    return make(rows)


def open_writer(format: str, shape: str, explain: bool) -> Writer:
    """The columns that say what is left out are there where `explain` asks for them."""
    columns = _entry(format, shape).columns
    if format in DOCUMENTS:
        return lines.ndjson()
    return CONTAINERS[format]({**EXCLUSION, **columns} if explain else columns)


def _entry(format: str, shape: str) -> Entry:
    return DOCUMENTS.get(format) or SHAPES[shape]
