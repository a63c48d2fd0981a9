"""Adds where a chunk lies in a pack in object storage, and the erasures that packs have not finished.

Revision: 0011, after 0010.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_IN_PACK = sa.text("location IS NOT NULL")


def upgrade() -> None:
    op.add_column("chunks", sa.Column("pack_offset", sa.BigInteger))
    op.add_column("chunks", sa.Column("pack_length", sa.BigInteger))
    op.create_index("ix_chunks_location", "chunks", ["location"], sqlite_where=_IN_PACK, postgresql_where=_IN_PACK)
    op.create_table("pack_erasures", sa.Column("session_id", sa.String(128), nullable=False, primary_key=True))


def downgrade() -> None:
    """Move the payloads into the database first (`turnlog payloads move`): this forgets where they are."""
    op.drop_table("pack_erasures")
    op.drop_index("ix_chunks_location", "chunks")
    op.drop_column("chunks", "pack_length")
    op.drop_column("chunks", "pack_offset")
