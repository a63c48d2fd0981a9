"""PostgreSQL: free space in the pages of `sessions`, autovacuum by number of dead rows, no statistics of content.

A head is updated twice in each turn. An update without free space in its page writes to every index. Rows of
`open_turns` and `group_changes` exist for one turn. So autovacuum must not wait until a share of these mostly empty
tables is dead. Content has no statistics, because no query selects it by value and the statistics would contain samples
of erased content. Only new pages change; nothing is rewritten. SQLite needs none of this.

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
        # A change to the same type rewrites nothing and deletes the sampled statistics. It also resets the storage.
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
