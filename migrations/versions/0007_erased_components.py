"""The components of rewards go with a session's content: also those of sessions that earlier releases erased.

An erasure left the names and values of a reward's components in the log. They are taken out as it takes them out now;
the rewards stay. On PostgreSQL no statistics are kept of the log's data any more: they would hold samples of it. As
after any erasure, old bytes stay in PostgreSQL's pages until `python -m ops.compact --full`.

What was erased does not come back with a downgrade.

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
"""Rewards in memory at a time: there was no limit to what one held."""

VERSION = 2
"""Of `RewardAssigned` as it is written here."""

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
        # Of the same type: nothing is rewritten, and what had been sampled goes.
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
    """An event as it is stored, JSON and its checksum; None where there is nothing to take out.

    Of one that is damaged nothing is left: nobody can say what of it may stay, and it cannot be read either way.
    """
    text, separator, check = data.rpartition(b"#")
    if data.endswith(b"}"):
        text, separator, check = data, b"", b""  # From before there were checksums.
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
