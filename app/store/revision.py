"""The revision of a database, and the one that this code needs.

Alembic knows both, but its import takes a tenth of the start-up time, and only migrations need it.
"""

from __future__ import annotations

import re
from pathlib import Path

from sqlalchemy import Connection, column, inspect, select, table

from app.errors import StartupError

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"

_LINE = re.compile(r'^(down_)?revision = "(\w+)"$', re.MULTILINE)
_VERSION = table("alembic_version", column("version_num"))


def revision_head() -> str:
    """The revision that this code needs: the one without a successor."""
    revisions, followed = _named()
    return max(revisions - followed, default="")


def is_known(revision: str | None) -> bool:
    """Can this code serve such a database, or migrate it?"""
    return not revision or revision in _named()[0]


def require_known(revision: str | None) -> None:
    """Raises StartupError for a database of another version."""
    if not is_known(revision):
        raise StartupError(
            f"the database is at revision {revision}, this version needs {revision_head()}: another version made it, "
            "from before the first release, and this one cannot read it; export it with the checkout that made it"
        )


def require_head(revision: str | None) -> None:
    """Raises StartupError, which says how to get there, for a database at another revision than this code's."""
    require_known(revision)
    if revision != revision_head():
        raise StartupError(
            f"the database is at revision {revision or 'none'}, this version needs {revision_head()}: "
            "run `turnlog migrate` (in a checkout also `alembic upgrade head`)"
        )


def _named() -> tuple[set[str], set[str]]:
    """All revisions, and those that have a successor."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for path in (MIGRATIONS / "versions").glob("*.py"):
        for down, revision in _LINE.findall(path.read_text("utf-8")):
            found[bool(down)].add(revision)
    return found[False], found[True]


def revision_of(connection: Connection) -> str | None:
    """The database's revision; None if it has none yet."""
    if not inspect(connection).has_table(_VERSION.name):
        return None
    return connection.execute(select(_VERSION.c.version_num)).scalar()
