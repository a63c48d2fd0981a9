"""What is wrong with rows: before they leave the database, and before those of a file, which anyone may have written,
come back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import zstandard
from sqlalchemy import BigInteger, Column, Double, Integer, SmallInteger, String

from app.domain.events import UnknownEvent
from app.domain.patterns import is_id
from app.features.archive.rows import CONTENT, LARGEST_BYTES, LARGEST_EVENTS, Rollout, StoredRows
from app.features.groups.schema import groups
from app.store.schema import (
    annotation_columns,
    blobs,
    chunks,
    events,
    refused_replies,
    sessions,
    turns,
)
from app.store.sessions import EventRow, fold_rows
from workers import codec
from workers.codec import APART, CorruptContent, Exchange

LATEST = 253402300800.0
"""The year 10000, in seconds since the epoch: no later time can be shown."""

_APART_HEAD = 13
_TIMES = frozenset({"at", "created_at", "updated_at", "closed_at", "completed_at", "lease_until", "acked_at"})
_FRAMES = {
    turns: ("tokens", "exchange"),
    blobs: ("data",),
    chunks: ("data",),
    annotation_columns: ("data",),
    refused_replies: ("data",),
}
"""The columns that hold compressed content."""


def require_whole(session: StoredRows) -> None:
    """Raises CorruptContent unless the log is whole and all content can be read."""
    rows = [EventRow(*(row[name] for name in EventRow._fields)) for row in session.rows[events.name]]
    try:
        folded = fold_rows(session.session_id, None, rows)
    except (UnknownEvent, LookupError, ValueError, TypeError, AssertionError) as error:
        raise CorruptContent(f"its log cannot be read: {type(error).__name__}") from error
    if folded is None or folded.version != session.head["version"] or folded.status != session.head["status"]:
        raise CorruptContent("its log is incomplete")
    if folded.config.of_run != session.head["run"]:
        raise CorruptContent("its log names another run")
    for row in session.rows[turns.name]:
        codec.unpack_tokens(row["tokens"], row["exchange"])
        codec.unpack(row["exchange"], Exchange)
    for row in session.rows[blobs.name]:
        content = codec.decompress(row["data"], LARGEST_BYTES)
        if row["kind"] == "metadata":
            _text(content)
    for row in session.rows[chunks.name]:
        if row["tombstoned_by"] is None and len(codec.decompress(row["data"], row["size"])) != row["size"]:
            raise CorruptContent("a chunk has another size")


def require_own(rollout: Rollout) -> None:
    """Raises CorruptContent unless a file's rollout is one that this version could have written.

    Sizes are looked at before anything is unpacked.
    """
    if not _is_id(rollout.root_id):
        raise CorruptContent("the rollout's id is not valid")
    of_root = rollout.sessions[0].head
    for session in rollout.sessions:
        head = session.head
        _require_columns(sessions.columns, head)
        if not _is_id(session.session_id) or head["root_id"] not in (None, rollout.root_id):
            raise CorruptContent("an id is not valid, or belongs to another rollout")
        if head["run"] != of_root["run"]:
            raise CorruptContent("a session belongs to another run than its root")
        if head["status"] != "closed" or head["open_turns"] != 0 or head["closed_at"] is None:
            raise CorruptContent("a session is not closed")
        if session.feed is not None:
            _require_columns(groups.columns, session.feed)
        # All have the root's group's row, whatever group a child names.
        if session.feed is not None and any(session.feed[name] != of_root[name] for name in ("run", "group_id")):
            raise CorruptContent("a session has another group's row")
        for table, columns in CONTENT.items():
            keys = [column.name for column in table.primary_key.columns if column.name != "session_id"]
            rows = session.rows[table.name]
            for row in rows:
                _require_columns(columns, row)
                for name in _FRAMES.get(table, ()):
                    _require_frame(row[name])
            if len({tuple(row[name] for name in keys) for row in rows}) < len(rows):
                raise CorruptContent(f"a row of {table.name} occurs twice")
        if sum(len(row["data"]) for row in session.rows[events.name]) > LARGEST_EVENTS:
            raise CorruptContent(f"its events have more than {LARGEST_EVENTS} bytes")
        require_whole(session)


def _is_id(text: object) -> bool:
    return isinstance(text, str) and is_id(text)


def _require_columns(columns: Iterable[Column[Any]], row: Mapping[str, Any]) -> None:
    for column in columns:
        value = row[column.name]
        if value is None:
            if not column.nullable:
                raise CorruptContent(f"{column.table.name}.{column.name} is missing")
        elif not _fits(column, value):
            raise CorruptContent(f"{column.table.name}.{column.name} has a value that no version writes")


def _fits(column: Column[Any], value: Any) -> bool:
    """`value` has the type that a file's schema gives the column."""
    match column.type:
        case SmallInteger():
            return bool(-(2**15) <= value < 2**15)
        case Integer() if not isinstance(column.type, BigInteger):
            return bool(-(2**31) <= value < 2**31)
        case Double():
            return math.isfinite(value) and (column.name not in _TIMES or 0 <= value < LATEST)
        case String() as kind:
            return "\0" not in value and (kind.length is None or len(value) <= kind.length)
    return True


def _require_frame(frame: bytes | None) -> None:
    """Raises CorruptContent for one that says that it unpacks to more than a rollout may hold."""
    if frame is None:
        return
    body = frame[_APART_HEAD:] if frame[:1] == APART else frame
    try:
        size = zstandard.frame_content_size(body)
    except zstandard.ZstdError as error:
        raise CorruptContent("content is not a compressed frame") from error
    if not 0 <= size <= LARGEST_BYTES:
        raise CorruptContent(f"content declares {size} bytes")


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CorruptContent("metadata is not text") from error
