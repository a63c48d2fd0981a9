"""All tables: the kernel's and those of the features that are there, as the code describes them.

The first release writes their SQL down here. Until then a change of a table gives this revision another name, so that a
store of before is refused.

Revision: first_25, the first.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import insert

from app.composition import metadata
from app.store.damage import Content
from app.store.schema import store_meta

revision = "first_25"
down_revision = None
branch_labels = None
depends_on = None

# Nothing selects content by value, and statistics would keep it after an erasure.
ON_POSTGRESQL = (
    "ALTER TABLE sessions ALTER note SET STATISTICS 0, ALTER tags SET STATISTICS 0, ALTER annotated SET STATISTICS 0",
    "ALTER TABLE events ALTER data SET STATISTICS 0",
)

PLAIN = ("events", "fleet_events")
"""Their content is text. The others' has been compressed by the service: PostgreSQL does not try it again."""


def upgrade() -> None:
    connection, tables = op.get_bind(), metadata()
    tables.create_all(connection)
    connection.execute(insert(store_meta).values(key="epoch", value="1"))
    if connection.dialect.name != "postgresql":
        return
    for statement in ON_POSTGRESQL:
        op.execute(statement)
    for table in tables.sorted_tables:
        for column in table.columns:
            if isinstance(column.type, Content) and table.name not in PLAIN:
                place = f"ALTER TABLE {table.name} ALTER {column.name}"
                op.execute(f"{place} SET STORAGE EXTERNAL, ALTER {column.name} SET STATISTICS 0")
