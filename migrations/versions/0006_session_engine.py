"""Adds the engine of a session's newest committed turn, for lists of sessions.

Revision: 0006, after 0005.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

PAGE = 500
"""Sessions filled in one step, which reads the end of each session's log."""

_events = sa.table(
    "events",
    sa.column("session_id", sa.String),
    sa.column("seq", sa.BigInteger),
    sa.column("type", sa.String),
    sa.column("data", sa.LargeBinary),
)
_sessions = sa.table(
    "sessions",
    sa.column("session_id", sa.String),
    sa.column("turns", sa.Integer),
    sa.column("engine", sa.Text),
)
_last_turn = (
    sa.select(_events.c.data)
    .where(_events.c.session_id == _sessions.c.session_id, _events.c.type == "TurnCommitted")
    .order_by(_events.c.seq.desc())
    .limit(1)
    .scalar_subquery()
)


def upgrade() -> None:
    op.add_column("sessions", sa.Column("engine", sa.Text))
    _fill(op.get_bind())


def downgrade() -> None:
    op.drop_column("sessions", "engine")


def _fill(connection: sa.Connection) -> None:
    query = (
        sa.select(_sessions.c.session_id, _last_turn)
        .where(_sessions.c.turns > 0)
        .order_by(_sessions.c.session_id)
        .limit(PAGE)
    )
    change = (
        sa.update(_sessions)
        .where(_sessions.c.session_id == sa.bindparam("sid"))
        .values(engine=sa.bindparam("answered_by"))
    )
    after = ""
    while page := list(connection.execute(query.where(_sessions.c.session_id > after))):
        connection.execute(change, [{"sid": row[0], "answered_by": _engine(row[1])} for row in page])
        after = page[-1][0]


def _engine(data: bytes | None) -> str | None:
    """The engine in a `TurnCommitted`, whose JSON may be followed by a checksum. None if absent or damaged."""
    try:
        fields: dict[str, Any] = json.JSONDecoder().raw_decode((data or b"{}").decode())[0]
    except ValueError:
        return None
    engine = fields.get("engine")
    return engine if isinstance(engine, str) else None
