"""Adds checkpoints: named cuts over all sessions and groups.

Revision: 0012, after 0011.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "checkpoints",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            sa.Identity(),
            primary_key=True,
        ),
        sa.Column("name", sa.String(128)),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("cut", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("sessions", sa.Integer, nullable=False),
        sa.Column("groups", sa.Integer, nullable=False),
        sa.Column("restores", sa.String(128)),
        sa.UniqueConstraint("name", name="uq_checkpoints_name"),
    )
    op.create_table(
        "checkpoint_sessions",
        sa.Column("session_id", sa.String(128), nullable=False),
        sa.Column("checkpoint_id", sa.BigInteger, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("is_done", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("session_id", "checkpoint_id", name="pk_checkpoint_sessions"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "checkpoint_groups",
        sa.Column("checkpoint_id", sa.BigInteger, nullable=False),
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("sessions", sa.Integer, nullable=False),
        sa.Column("erased", sa.Integer, nullable=False),
        sa.Column("unfinished", sa.Integer, nullable=False),
        sa.Column("completed_at", sa.Double),
        sa.Column("measured", sa.Boolean, nullable=False),
        sa.Column("oldest_version", sa.BigInteger),
        sa.Column("consumer", sa.String(128)),
        sa.Column("lease_until", sa.Double),
        sa.Column("handed_out", sa.Integer, nullable=False),
        sa.Column("acked_at", sa.Double),
        sa.PrimaryKeyConstraint("checkpoint_id", "group_id", name="pk_checkpoint_groups"),
    )


def downgrade() -> None:
    """The sessions stay as they are; nothing pins their content any more."""
    op.drop_table("checkpoint_groups")
    op.drop_table("checkpoint_sessions")
    op.drop_table("checkpoints")
