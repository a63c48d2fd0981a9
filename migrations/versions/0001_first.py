"""The first schema: the log, the claims, the content.

Revision: 0001, the first.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SESSION_ID = sa.String(128)


def upgrade() -> None:
    postgresql = op.get_bind().dialect.name == "postgresql"
    current_tx = sa.text("(pg_current_xact_id()::text::bigint)" if postgresql else "0")
    op.create_table(
        "store_meta",
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_store_meta"),
    )
    op.create_table(
        "incarnations",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), sa.Identity(), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("heartbeat_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_incarnations"),
    )
    op.create_table(
        "sessions",
        sa.Column("session_id", SESSION_ID, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("open_turns", sa.Integer, nullable=False),
        sa.Column("turns", sa.Integer, nullable=False),
        sa.Column("group_id", sa.Text),
        sa.Column("reward", sa.Double),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("body_hash", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("session_id", name="pk_sessions"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_sessions_created_at_session_id", "sessions", ["created_at", "session_id"])
    op.create_index("ix_sessions_group_id", "sessions", ["group_id"])
    op.create_table(
        "open_turns",
        sa.Column("session_id", SESSION_ID, nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("turn", sa.Integer, nullable=False),
        sa.Column("parent_turn", sa.Integer, nullable=False),
        sa.Column("incarnation", sa.BigInteger, nullable=False),
        sa.Column("body_hash", sa.String(32), nullable=False),
        sa.Column("retry_key", sa.String(32)),
        sa.Column("opened_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("session_id", "fence", name="pk_open_turns"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "events",
        sa.Column("session_id", SESSION_ID, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("version", sa.SmallInteger, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.Column("tx", sa.BigInteger, server_default=current_tx, nullable=False),
        sa.Column("position", sa.BigInteger, sa.Identity(), nullable=False),
        sa.PrimaryKeyConstraint("session_id", "seq", name="pk_events"),
    )
    op.create_index("ix_events_tx_position", "events", ["tx", "position"])
    op.create_table(
        "turns",
        sa.Column("session_id", SESSION_ID, nullable=False),
        sa.Column("turn", sa.Integer, nullable=False),
        sa.Column("parent_turn", sa.Integer, nullable=False),
        sa.Column("segment", sa.Integer, nullable=False),
        sa.Column("choice_index", sa.SmallInteger, nullable=False),
        sa.Column("protocol", sa.String(16), nullable=False),
        sa.Column("facts", sa.LargeBinary),
        sa.Column("wire", sa.LargeBinary),
        sa.PrimaryKeyConstraint("session_id", "turn", "choice_index", name="pk_turns"),
    )
    op.create_table(
        "blobs",
        sa.Column("session_id", SESSION_ID, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("location", sa.Text),
        sa.Column("data", sa.LargeBinary),
        sa.PrimaryKeyConstraint("session_id", "number", name="pk_blobs"),
    )
    op.create_table(
        "snapshots",
        sa.Column("session_id", SESSION_ID, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("format", sa.String(32), nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("session_id", name="pk_snapshots"),
    )
    if postgresql:
        for table, column in (
            ("turns", "facts"),
            ("turns", "wire"),
            ("blobs", "data"),
            ("snapshots", "data"),
        ):
            op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")
    op.execute("INSERT INTO store_meta (key, value) VALUES ('epoch', '1')")


def downgrade() -> None:
    for table in (
        "snapshots",
        "blobs",
        "turns",
        "events",
        "open_turns",
        "sessions",
        "incarnations",
        "store_meta",
    ):
        op.drop_table(table)
