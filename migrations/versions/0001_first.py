"""The tables of 0.1.0: the kernel's and all features', as the SQL files beside this one have them.

Revision: 0001, the first.
"""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    written = Path(__file__).with_name(f"0001_first.{connection.dialect.name}.sql").read_text("utf-8")
    for statement in written.split(";\n"):
        if statement.strip():
            connection.exec_driver_sql(statement)
    connection.exec_driver_sql("INSERT INTO store_meta (key, value) VALUES ('epoch', '1')")
