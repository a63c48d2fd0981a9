"""Adds the tokens of turns in flight, which a retry goes on from after a crash.

Revision: 0010, after 0009.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "staged_tokens",
        sa.Column("session_id", sa.String(128), nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("part", sa.Integer, nullable=False),
        sa.Column("request_hash", sa.String(64), nullable=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("weight_version", sa.Text),
        sa.Column("logprobs_of", sa.String(16)),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("session_id", "fence", "number", name="pk_staged_tokens"),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE staged_tokens ALTER COLUMN data SET STORAGE EXTERNAL")
        op.execute("ALTER TABLE staged_tokens ALTER COLUMN data SET STATISTICS 0")


def downgrade() -> None:
    """Turns in flight are generated anew."""
    op.drop_table("staged_tokens")
