"""Adds replay payloads, refused replies, and the time at which a session was closed.

Revision: 0002, after 0001.
"""

from __future__ import annotations

import logging

import sqlalchemy as sa
from alembic import op

log = logging.getLogger("turnlog.migrations")

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

SESSION_ID = sa.String(128)


def upgrade() -> None:
    op.create_table(
        "chunks",
        sa.Column("session_id", SESSION_ID, nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("hash", sa.String(32), nullable=False),
        sa.Column("tombstoned_by", sa.BigInteger),
        sa.Column("location", sa.Text),
        sa.Column("data", sa.LargeBinary),
        sa.PrimaryKeyConstraint("session_id", "fence", "number", name="pk_chunks"),
    )
    op.create_table(
        "refused_replies",
        sa.Column("session_id", SESSION_ID, nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("session_id", "fence", name="pk_refused_replies"),
    )
    op.add_column("sessions", sa.Column("closed_at", sa.Double))
    # The event's time, not `updated_at`: a reward or an erasure may have come after the close.
    op.execute(
        "UPDATE sessions SET closed_at = ("
        "SELECT events.at FROM events WHERE events.session_id = sessions.session_id AND events.type = 'SessionClosed' "
        "ORDER BY events.seq DESC LIMIT 1) WHERE status <> 'open'"
    )
    op.create_index("ix_sessions_closed_at_session_id", "sessions", ["closed_at", "session_id"])
    if op.get_bind().dialect.name == "postgresql":
        for table in ("chunks", "refused_replies"):
            op.execute(f"ALTER TABLE {table} ALTER COLUMN data SET STORAGE EXTERNAL")


def downgrade() -> None:
    """Remove replay payloads and refused replies. The older release cannot read the events that name them."""
    chunks = op.get_bind().scalar(sa.text("SELECT count(*) FROM chunks WHERE data IS NOT NULL"))
    replies = op.get_bind().scalar(sa.text("SELECT count(*) FROM refused_replies"))
    if chunks or replies:
        log.warning("downgrade to 0001: %d chunks of replay payloads and %d refused replies are lost", chunks, replies)
    op.drop_index("ix_sessions_closed_at_session_id", "sessions")
    op.drop_column("sessions", "closed_at")
    op.drop_table("refused_replies")
    op.drop_table("chunks")
