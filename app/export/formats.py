"""The available shapes and formats, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import msgspec

from app.domain.samples import Age, Segment, Status
from app.errors import InvalidRequest, Unsupported
from app.export.containers.safetensors import SafetensorsWriter
from app.export.containers.writer import EXCLUDED as EXCLUDED
from app.export.containers.writer import EXCLUSION, Instead, msgpack, ndjson, refuse
from app.export.containers.writer import ContainerWriter as ContainerWriter
from app.export.query import ExportQuery
from app.export.row import Columns, Fields, Row, Shape
from app.export.shapes import (
    areal,
    atif,
    atropos,
    miles,
    openenv,
    prime_rl,
    rllm,
    shared,
    skyrl,
    slime,
    tinker,
    tree,
    trl,
    trl_async,
    turnlog,
    verl,
    xtuner,
)
from app.extras import install_command

GroupShape = Callable[[Sequence[Row]], Fields]
"""Makes one row of all rows of a group. Raises Unfit."""


class ShapeEntry(msgspec.Struct, frozen=True):
    """How a shape makes its rows, from one row or from all rows of a session or a group, and its columns.

    `of_session`: `SessionTree` makes them. `last_status`: a row's status is that of its last turn instead of all its
    turns. `of_turns`: the columns that hold the rewards of turns. `masks`: those of sampling masks, in an export with
    replay payloads. `needs_advantage`: where an export asks for advantages, a row without one is none.
    `takes_untrained`: a row of which nothing is in the loss is one too.
    """

    columns: Columns
    of_row: Shape | None = None
    of_session: bool = False
    of_group: GroupShape | None = None
    last_status: bool = False
    masks: Columns = {}
    of_turns: Columns = {}
    needs_advantage: bool = False
    takes_untrained: bool = False


DEFAULT = "turnlog"

SHAPES: Mapping[str, ShapeEntry] = {
    "turnlog": ShapeEntry(turnlog.COLUMNS, turnlog.fields, masks=turnlog.MASKS, takes_untrained=True),
    "miles": ShapeEntry(miles.COLUMNS, miles.fields, last_status=True, masks=miles.MASKS),
    "slime": ShapeEntry(slime.COLUMNS, slime.fields, masks=slime.MASKS),
    "verl": ShapeEntry(verl.COLUMNS, verl.fields, of_turns=verl.OF_TURNS),
    "skyrl": ShapeEntry(skyrl.COLUMNS, skyrl.fields, masks=skyrl.MASKS, of_turns=skyrl.OF_TURNS),
    "trl": ShapeEntry(trl.COLUMNS, trl.fields),
    "trl-async": ShapeEntry(trl_async.COLUMNS, trl_async.fields),
    "openenv": ShapeEntry(openenv.COLUMNS, openenv.fields, takes_untrained=True),
    "xtuner": ShapeEntry(xtuner.COLUMNS, xtuner.fields),
    "rllm": ShapeEntry(rllm.COLUMNS, rllm.fields, takes_untrained=True),
    "tinker": ShapeEntry(tinker.COLUMNS, tinker.fields, needs_advantage=True),
    "areal": ShapeEntry(areal.COLUMNS, areal.fields),
    "prime-rl": ShapeEntry(prime_rl.COLUMNS, prime_rl.fields, masks=prime_rl.MASKS, needs_advantage=True),
    "atropos": ShapeEntry(atropos.COLUMNS, of_group=atropos.group_fields, needs_advantage=True),
    "tree": ShapeEntry(tree.COLUMNS, of_session=True),
}


def _parquet(columns: Columns, instead: Instead) -> ContainerWriter:
    # pyarrow is heavy; a server that never writes Parquet never loads it.
    from app.export.containers.parquet import ParquetWriter

    return ParquetWriter(columns, instead)


CONTAINERS: Mapping[str, Callable[[Columns, Instead], ContainerWriter]] = {
    "ndjson": lambda columns, instead: ndjson(instead),
    "parquet": _parquet,
    "safetensors": SafetensorsWriter,
    "msgpack": lambda columns, instead: msgpack(instead),
}
"""Formats that take any shape."""

DOCUMENTS: Mapping[str, ShapeEntry] = {
    "atif": ShapeEntry(atif.COLUMNS, atif.fields, takes_untrained=True),
    "messages": ShapeEntry(turnlog.MESSAGES_COLUMNS, turnlog.messages),
}
"""Formats with rows of their own, one JSON object per line."""

FORMATS = (*CONTAINERS, *DOCUMENTS)

LINKING = ("ndjson", "msgpack", "parquet")
"""Formats with a place for payloads as URLs."""


def require(query: ExportQuery) -> None:
    """Raises InvalidRequest for an unknown format or shape, a shape with a format of its own rows, or what these
    cannot hold; Unsupported without pyarrow."""
    format, shape = query.format, query.shape
    if query.stale == "mask" and query.max_staleness is None:
        raise InvalidRequest("stale=mask needs max_staleness")
    if query.routing == "sampled" and not query.replay:
        raise InvalidRequest("routing=sampled needs replay=true")
    if format not in FORMATS:
        raise InvalidRequest(f"format={format} is not one of {', '.join(FORMATS)}")
    if shape not in SHAPES:
        raise InvalidRequest(f"shape={shape} is not one of {', '.join(SHAPES)}")
    if format == "parquet" and find_spec("pyarrow") is None:
        raise Unsupported(
            f"format=parquet needs pyarrow on the server (turnlog[parquet]): {install_command('parquet')}"
        )
    if format in DOCUMENTS and shape != DEFAULT:
        raise InvalidRequest(
            f"format={format} has its own rows and does not support shape={shape}; formats that do: "
            f"{', '.join(CONTAINERS)}"
        )
    if format in DOCUMENTS and query.stale != "drop":
        raise InvalidRequest(f"format={format} has no loss mask and does not support stale={query.stale}")
    if query.rewards == "turn" and not _entry(format, shape).of_turns:
        named = ", ".join(name for name, entry in SHAPES.items() if entry.of_turns)
        raise InvalidRequest(f"rewards=turn needs a shape with rewards of tokens: {named}")
    if query.stale != "drop" and takes_sessions(shape):
        raise InvalidRequest(f"shape={shape} does not support stale={query.stale}")
    if query.columns and (format in DOCUMENTS or takes_groups(shape) or takes_sessions(shape)):
        raise InvalidRequest(f"{f'format={format}' if format in DOCUMENTS else f'shape={shape}'} has no columns")
    if query.top_k is not None and (shape != DEFAULT or format in DOCUMENTS):
        raise InvalidRequest(f"top_k is a parameter of shape={DEFAULT} in the formats {', '.join(CONTAINERS)}")
    if query.replay == "urls" and (format not in LINKING or shape != DEFAULT or query.routing != "newest"):
        named = ", ".join(LINKING)
        raise InvalidRequest(f"replay=urls needs shape={DEFAULT}, routing=newest and one of the formats {named}")


def takes_groups(shape: str) -> bool:
    """Does a row of this shape contain a whole group?"""
    return SHAPES[shape].of_group is not None


def needs_advantage(query: ExportQuery) -> bool:
    """Has a row without an advantage no place in this shape? A trainer may bring advantages in a column."""
    return SHAPES[query.shape].needs_advantage and "advantages" not in query.column_names


def takes_sessions(shape: str) -> bool:
    """Does a row of this shape contain all rows of a session?"""
    return SHAPES[shape].of_session


def takes_text(format: str) -> bool:
    """Has this format rows of sessions without ids?"""
    return format in DOCUMENTS


def status_of(format: str, shape: str, segment: Segment) -> Status:
    """The status that a segment's row has in this shape."""
    return segment.last_status if _entry(format, shape).last_status else segment.status


def takes(format: str, shape: str, segment: Segment) -> bool:
    """Has this shape a row of a segment, as far as its loss is concerned?"""
    entry = _entry(format, shape)
    return entry.takes_untrained or entry.of_row is None or not segment.is_copied


def of_row(format: str, shape: str, row: Row) -> Fields:
    """Raises Unfit."""
    entry = _entry(format, shape)
    make = entry.of_row
    if make is None:
        raise ValueError(f"a row of shape {shape} is made of a whole session or a whole group")
    asked: Fields = {} if row.age is None else msgspec.structs.asdict(row.age)
    if row.columns is not None:
        values = {name: None if column is None else column.values for name, column in row.columns.items()}
        masks = {name: None if column is None else column.mask for name, column in row.columns.items()}
        asked = {**asked, "columns": values, "column_masks": masks}
    return {**make(row), **asked} if asked else make(row)


def of_group(shape: str, rows: Sequence[Row]) -> Fields:
    """Raises Unfit."""
    make = SHAPES[shape].of_group
    if make is None:
        raise ValueError(f"a row of shape {shape} is made of one row")
    ages = [row.age for row in rows if row.age is not None]
    told = {name: [getattr(age, name) for age in ages] for name in Age.__struct_fields__} if ages else {}
    return {**make(rows), **told}


def columns_of(query: ExportQuery) -> Columns:
    """The columns of the rows that a query asks for; with `explain`, those of exclusions too. Columns of turns' tokens
    are of float64, which holds whichever type each of them is."""
    entry = _entry(query.format, query.shape)
    columns = dict(entry.columns)
    if names := query.column_names:
        columns |= {"columns": dict.fromkeys(names, "[float64]"), "column_masks": dict.fromkeys(names, "[uint8]")}
    if query.top_k is not None:
        columns |= turnlog.TOP_COLUMNS
    if query.rewards == "turn":
        columns |= entry.of_turns
    if query.stale != "drop":
        columns |= dict.fromkeys(Age.__struct_fields__, "json" if entry.of_group else "int64")
    if query.replay is True:
        columns |= entry.masks
        if query.routing == "sampled" and "sampling" in columns:
            columns |= shared.ROUTED
    return {**EXCLUSION, **columns} if query.explain else columns


def open_writer(query: ExportQuery, instead: Instead = refuse) -> ContainerWriter:
    """`instead`: of a row that the container cannot hold."""
    if query.format in DOCUMENTS:
        return ndjson(instead)
    return CONTAINERS[query.format](columns_of(query), instead)


def _entry(format: str, shape: str) -> ShapeEntry:
    return DOCUMENTS.get(format) or SHAPES[shape]
