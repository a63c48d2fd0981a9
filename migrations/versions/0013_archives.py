"""Adds archives: closed sessions whose events and content are in object storage.

Revision: 0013, after 0012.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "archives",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), sa.Identity(), primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("writer", sa.BigInteger),
        sa.UniqueConstraint("name", name="uq_archives_name"),
    )
    op.create_table(
        "archived_sessions",
        sa.Column("session_id", sa.String(128), primary_key=True),
        sa.Column("archive_id", sa.BigInteger),
        sa.Column("row_group", sa.Integer, nullable=False),
        sa.Column("tx", sa.BigInteger, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("exported_tx", sa.BigInteger, nullable=False),
        sa.Column("exported_position", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_archived_sessions_archive_id", "archived_sessions", ["archive_id"])
    op.create_index("ix_archived_sessions_tx_position", "archived_sessions", ["tx", "position"])
    op.create_index(
        "ix_archived_sessions_exported_tx_exported_position",
        "archived_sessions",
        ["exported_tx", "exported_position"],
    )


def downgrade() -> None:
    """Refuses while a session is archived: its content would be lost."""
    archived = op.get_bind().execute(sa.text("SELECT count(archive_id) FROM archived_sessions")).scalar_one()
    if archived:
        raise RuntimeError(f"{archived} sessions are archived: restore them first (turnlog archive restore)")
    op.drop_table("archived_sessions")
    op.drop_table("archives")
