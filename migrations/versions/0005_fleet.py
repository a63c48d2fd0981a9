"""Adds the fleet: a log of engines and gates, the affinities that clients requested, and the adapter of an open turn.

Revision: 0005, after 0004.
"""

from __future__ import annotations

import json
import logging

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

log = logging.getLogger("turnlog.migrations")

_events = sa.table(
    "events",
    sa.column("session_id", sa.String),
    sa.column("seq", sa.BigInteger),
    sa.column("data", sa.LargeBinary),
)
_open_turns = sa.table(
    "open_turns",
    sa.column("session_id", sa.String),
    sa.column("fence", sa.BigInteger),
    sa.column("adapter", sa.Text),
)


def upgrade() -> None:
    op.add_column("open_turns", sa.Column("adapter", sa.Text))
    _fill_adapters(op.get_bind())
    op.create_table(
        "fleet_events",
        sa.Column("seq", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("version", sa.SmallInteger, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_fleet_events"),
    )
    op.create_index("ix_fleet_events_key_seq", "fleet_events", ["key", "seq"])
    op.create_table(
        "affinities",
        sa.Column("control_id", sa.String(128), nullable=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("worker_session", sa.Boolean, nullable=False),
        sa.Column("timeout_s", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("incarnation", sa.BigInteger, nullable=False),
        sa.Column("session_id", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint("control_id", name="pk_affinities"),
    )
    op.create_index("ix_affinities_expires_at", "affinities", ["expires_at"])


def downgrade() -> None:
    """Remove the engines that were added or drained, the gates that were closed, and the affinities of clients."""
    said = op.get_bind().scalar(sa.text("SELECT count(DISTINCT key) FROM fleet_events"))
    affinities = op.get_bind().scalar(sa.text("SELECT count(*) FROM affinities"))
    if said or affinities:
        log.warning(
            "downgrade to 0004: what was said of %d engines and gates, and %d affinities are lost", said, affinities
        )
    op.drop_table("affinities")
    op.drop_table("fleet_events")
    op.drop_column("open_turns", "adapter")


def _fill_adapters(connection: sa.Connection) -> None:
    """Copy the adapters from the events of open turns, which exist if this release ran before a downgrade."""
    opened = sa.and_(_events.c.session_id == _open_turns.c.session_id, _events.c.seq == _open_turns.c.fence)
    query = sa.select(_open_turns.c.session_id, _open_turns.c.fence, _events.c.data).join(_events, opened)
    for session_id, fence, data in list(connection.execute(query)):
        adapter = _adapter(data)
        if adapter is not None:
            claim = (_open_turns.c.session_id == session_id) & (_open_turns.c.fence == fence)
            connection.execute(sa.update(_open_turns).where(claim).values(adapter=adapter))


def _adapter(data: bytes) -> str | None:
    """The adapter in a `TurnOpened`, whose JSON may be followed by a checksum. None if absent or damaged."""
    try:
        adapter = json.JSONDecoder().raw_decode(data.decode())[0].get("adapter")
    except ValueError:
        return None
    return adapter if isinstance(adapter, str) else None
