"""Adds the tables of the search index. They stay empty unless TURNLOG_SEARCH is on.

SQLite's full-text tables are made when they are needed: not every build of SQLite can.

Revision: 0016, after 0015.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "search_state",
        sa.Column("key", sa.String(32), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    op.create_table(
        "search_entries",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), sa.Identity(), primary_key=True),
        sa.Column("shard", sa.Integer, nullable=False),
        sa.Column("session_id", sa.String(128), nullable=False),
        sa.Column("turn", sa.Integer, nullable=False),
        sa.Column("message", sa.Integer),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("tools", sa.Text),
        sa.Column("finish_reason", sa.Text),
        sa.Column("reason", sa.Text),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
    )
    op.create_index("ix_search_entries_session_id_turn", "search_entries", ["session_id", "turn"])
    op.create_table(
        "search_shards",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("entries", sa.Integer, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("dirty", sa.Boolean, nullable=False),
    )
    op.create_table(
        "search_metadata",
        sa.Column("pair", sa.String(256), nullable=False),
        sa.Column("session_id", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint("pair", "session_id", name="pk_search_metadata"),
    )
    op.create_index("ix_search_metadata_session_id", "search_metadata", ["session_id"])
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE search_entries ADD COLUMN words tsvector")
        op.execute("CREATE INDEX ix_search_entries_words ON search_entries USING gin (words)")
        # What the planner wants to know of a column would be its content, which an erasure must reach.
        for table, column in (("search_entries", "text"), ("search_entries", "words"), ("search_metadata", "pair")):
            op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STATISTICS 0")


def downgrade() -> None:
    """The index is lost; it is made anew where it is on."""
    connection = op.get_bind()
    for shard in connection.execute(sa.text("SELECT id FROM search_shards")).scalars().all():
        op.execute(f"DROP TABLE IF EXISTS search_fts_{int(shard)}")
    for table in ("search_metadata", "search_shards", "search_entries", "search_state"):
        op.drop_table(table)
