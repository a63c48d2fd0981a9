"""Which revision a database is at, and which one this code needs.

Alembic would say so as well, but it takes a tenth of a start to import, and only whoever migrates needs it.
"""

from __future__ import annotations

import re
from pathlib import Path

from sqlalchemy import Connection, column, inspect, select, table

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"

_LINE = re.compile(r'^(down_)?revision = "(\w+)"$', re.MULTILINE)
_VERSION = table("alembic_version", column("version_num"))


def revision_head() -> str:
    """The revision that this code was written for: the one that no other comes after."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for path in (MIGRATIONS / "versions").glob("*.py"):
        for down, revision in _LINE.findall(path.read_text("utf-8")):
            found[bool(down)].add(revision)
    return max(found[False] - found[True], default="")


def revision_of(connection: Connection) -> str | None:
    """The database's; None where there is none yet."""
    if not inspect(connection).has_table(_VERSION.name):
        return None
    return connection.execute(select(_VERSION.c.version_num)).scalar()
