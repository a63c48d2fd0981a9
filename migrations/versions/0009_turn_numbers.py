"""Adds the highest turn number that a session has given out: with several turns in flight, no number is used twice.

Revision: 0009, after 0008.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

PAGE = 2000
"""Events in memory at the same time."""

_events = sa.table(
    "events",
    sa.column("session_id", sa.String),
    sa.column("seq", sa.BigInteger),
    sa.column("type", sa.String),
    sa.column("version", sa.SmallInteger),
    sa.column("data", sa.LargeBinary),
)
_sessions = sa.table("sessions", sa.column("session_id", sa.String), sa.column("last_turn", sa.Integer))


def upgrade() -> None:
    """Until now the number of a turn that did not commit was given to the next one, so there are no gaps.

    Only events that were written before a downgrade may have higher numbers.
    """
    op.add_column("sessions", sa.Column("last_turn", sa.Integer, nullable=False, server_default="0"))
    op.execute("UPDATE sessions SET last_turn = turns WHERE turns > 0")
    connection = op.get_bind()
    change = (
        sa.update(_sessions)
        .where(_sessions.c.session_id == sa.bindparam("sid"), _sessions.c.last_turn < sa.bindparam("number"))
        .values(last_turn=sa.bindparam("number"))
    )
    for page in _given_out(connection):
        connection.execute(change, page)


def _given_out(connection: sa.Connection) -> Iterator[list[dict[str, str | int]]]:
    """The numbers that were given out for good: those in `TurnOpened` since its version 4."""
    key = sa.tuple_(_events.c.session_id, _events.c.seq)
    query = (
        sa.select(_events.c.session_id, _events.c.seq, _events.c.data)
        .where(_events.c.type == "TurnOpened", _events.c.version >= 4)
        .order_by(_events.c.session_id, _events.c.seq)
        .limit(PAGE)
    )
    after: tuple[str, int] = "", 0
    while page := list(connection.execute(query.where(key > after))):
        yield [{"sid": session_id, "number": _number(data)} for session_id, _, data in page]
        after = page[-1][0], page[-1][1]


def _number(data: bytes) -> int:
    """The turn of a `TurnOpened`, whose JSON is followed by a checksum. 0 if it is damaged."""
    try:
        number = json.JSONDecoder().raw_decode(data.decode())[0]["turn"]
    except (ValueError, KeyError, TypeError):
        return 0
    return number if isinstance(number, int) else 0


def downgrade() -> None:
    op.drop_column("sessions", "last_turn")
