"""Adds an index of the search's entries that are in no row, by reason: few, for which a search read all entries.

Revision: 0017, after 0016.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    few = sa.text("reason IS NOT NULL")
    op.create_index(
        "ix_search_entries_reason", "search_entries", ["reason", "id"], sqlite_where=few, postgresql_where=few
    )


def downgrade() -> None:
    op.drop_index("ix_search_entries_reason", "search_entries")
