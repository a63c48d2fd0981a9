"""PostgreSQL: room in the pages of `sessions` for updates in place, a vacuum that goes by dead rows, no statistics.

A head is updated twice a turn, and an update that does not find room in its page writes into every index. Rows of
`open_turns` and `group_changes` live for one turn: what is dead in them must not wait for a share of a table that is
mostly empty. Of content no statistics are kept: nothing asks for it by value, and they would hold samples of what
has been erased. New pages only; nothing is rewritten. SQLite has nothing of the kind.

Revision: 0004, after 0003.
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

SHORT_LIVED = ("open_turns", "group_changes")
CONTENT = (
    ("turns", "facts"),
    ("turns", "wire"),
    ("blobs", "data"),
    ("chunks", "data"),
    ("refused_replies", "data"),
    ("snapshots", "data"),
)


def upgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    op.execute("ALTER TABLE sessions SET (fillfactor = 50)")
    for table in SHORT_LIVED:
        op.execute(f"ALTER TABLE {table} SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000)")
    for table, column in CONTENT:
        # Of the same type: nothing is rewritten, and what had been sampled goes. It also undoes the column's storage.
        op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} TYPE bytea")
        op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")
        op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STATISTICS 0")


def downgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    op.execute("ALTER TABLE sessions RESET (fillfactor)")
    for table, column in CONTENT:
        op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STATISTICS -1")
    for table in SHORT_LIVED:
        op.execute(f"ALTER TABLE {table} RESET (autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold)")
