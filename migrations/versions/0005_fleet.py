"""The fleet: a log of engines and gates, affinities by a client's wish, and the adapter of an open turn.

Revision: 0005, after 0004.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("open_turns", sa.Column("adapter", sa.Text))
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
    op.drop_table("affinities")
    op.drop_table("fleet_events")
    op.drop_column("open_turns", "adapter")
