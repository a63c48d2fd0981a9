"""Erases the components of rewards in sessions that earlier releases erased.

Those releases left the names and values of a reward's components in the log. They are removed as an erasure now does;
the rewards stay. On PostgreSQL the log's data has no statistics any more, since they would contain samples of it. As
after any erasure, old bytes stay in PostgreSQL's pages until `python -m ops.compact --full`.

A downgrade does not restore what was erased.

Revision: 0007, after 0006.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

PAGE = 16
"""Rewards in memory at the same time. Few, since the size of a reward had no limit."""

VERSION = 2
"""The version of `RewardAssigned` that this revision writes."""

_events = sa.table(
    "events",
    sa.column("session_id", sa.String),
    sa.column("seq", sa.BigInteger),
    sa.column("type", sa.String),
    sa.column("version", sa.SmallInteger),
    sa.column("data", sa.LargeBinary),
)
_sessions = sa.table("sessions", sa.column("session_id", sa.String), sa.column("status", sa.String))


def upgrade() -> None:
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        # A change to the same type rewrites nothing and deletes the sampled statistics.
        op.execute("ALTER TABLE events ALTER COLUMN data TYPE bytea")
        op.execute("ALTER TABLE events ALTER COLUMN data SET STATISTICS 0")
    _take_out(connection)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE events ALTER COLUMN data SET STATISTICS -1")


def _take_out(connection: sa.Connection) -> None:
    place = sa.tuple_(_events.c.session_id, _events.c.seq)
    query = (
        sa.select(_events.c.session_id, _events.c.seq, _events.c.data)
        .join_from(_sessions, _events, _events.c.session_id == _sessions.c.session_id)
        .where(_sessions.c.status == "erased", _events.c.type == "RewardAssigned")
        .order_by(_events.c.session_id, _events.c.seq)
        .limit(PAGE)
    )
    change = (
        sa.update(_events)
        .where(_events.c.session_id == sa.bindparam("sid"), _events.c.seq == sa.bindparam("place"))
        .values(version=VERSION, data=sa.bindparam("left"))
    )
    after: tuple[str, int] = ("", 0)
    while page := list(connection.execute(query.where(place > after))):
        for session_id, seq, data in page:
            left = _without_components(data)
            if left is not None:
                connection.execute(change, {"sid": session_id, "place": seq, "left": left})
        after = (page[-1][0], page[-1][1])


def _without_components(data: bytes) -> bytes | None:
    """An event without components, as stored: JSON and its checksum. None if it has none; empty if it is damaged.

    A damaged event is emptied completely, because nobody can tell which part may stay, and it cannot be read anyway.
    """
    text, separator, check = data.rpartition(b"#")
    if data.endswith(b"}"):
        text, separator, check = data, b"", b""  # Older events have no checksum.
    if separator and check != b"%08x" % zlib.crc32(text):
        return b""
    try:
        fields: dict[str, Any] | Any = json.loads(text)
    except ValueError:
        return b""
    if not isinstance(fields, dict):
        return b""
    if not fields.pop("components", None):
        return None
    left = json.dumps({**fields, "components_erased": True}, separators=(",", ":")).encode()
    return b"%b#%08x" % (left, zlib.crc32(left))
