"""Adds the root of each session's rollout, so that the sessions of agents and children can be found by it.

Revision: 0008, after 0007.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

PAGE = 2000
"""Events, or sessions, in memory at the same time."""

_events = sa.table(
    "events",
    sa.column("session_id", sa.String),
    sa.column("seq", sa.BigInteger),
    sa.column("data", sa.LargeBinary),
)
_sessions = sa.table(
    "sessions",
    sa.column("session_id", sa.String),
    sa.column("group_id", sa.Text),
    sa.column("root_id", sa.String),
)
_group_changes = sa.table("group_changes", sa.column("group_id", sa.Text))


def upgrade() -> None:
    op.add_column("sessions", sa.Column("root_id", sa.String(128)))
    connection = op.get_bind()
    parents = dict(_parents(connection))
    roots = {session_id: root for session_id in parents if (root := _root(session_id, parents)) != session_id}
    _fill(connection, roots)
    of_root = sa.text("root_id IS NOT NULL")
    op.create_index("ix_sessions_root_id", "sessions", ["root_id"], sqlite_where=of_root, postgresql_where=of_root)
    is_open = sa.text("root_id IS NOT NULL AND status = 'open'")
    op.create_index("ix_sessions_open_root_id", "sessions", ["root_id"], sqlite_where=is_open, postgresql_where=is_open)
    # Their groups counted them as separate rollouts, so these groups are counted again.
    named = sa.select(_sessions.c.group_id).where(_sessions.c.root_id.is_not(None), _sessions.c.group_id.is_not(None))
    connection.execute(_group_changes.insert().from_select(["group_id"], named.distinct()))


def downgrade() -> None:
    """Remove the roots. Groups with such sessions are noted as changed, so that every session is counted again."""
    named = sa.select(_sessions.c.group_id).where(_sessions.c.root_id.is_not(None), _sessions.c.group_id.is_not(None))
    op.get_bind().execute(_group_changes.insert().from_select(["group_id"], named.distinct()))
    op.drop_index("ix_sessions_open_root_id", "sessions")
    op.drop_index("ix_sessions_root_id", "sessions")
    op.drop_column("sessions", "root_id")


def _parents(connection: sa.Connection) -> Iterator[tuple[str, str]]:
    """Sessions with a parent, and the parent. Most sessions have none; they are not kept in memory."""
    query = (
        sa.select(_events.c.session_id, _events.c.data)
        .where(_events.c.seq == 1)
        .order_by(_events.c.session_id)
        .limit(PAGE)
    )
    after = ""
    while page := list(connection.execute(query.where(_events.c.session_id > after))):
        for session_id, data in page:
            parent = _parent(data)
            if parent is not None:
                yield session_id, parent
        after = page[-1][0]


def _parent(data: bytes) -> str | None:
    """The parent in a `SessionCreated`, whose JSON is followed by a checksum. None if absent or damaged."""
    try:
        fields: dict[str, Any] = json.JSONDecoder().raw_decode(data.decode())[0]
    except ValueError:
        return None
    config = fields.get("config")
    parent = config.get("parent") if isinstance(config, dict) else None
    return parent if isinstance(parent, str) else None


def _root(session_id: str, parents: Mapping[str, str]) -> str:
    """The last session of a line of parents. If the line is a cycle, it ends where it repeats."""
    at, seen = session_id, set[str]()
    while at in parents and at not in seen:
        seen.add(at)
        at = parents[at]
    return at


def _fill(connection: sa.Connection, roots: Mapping[str, str]) -> None:
    change = (
        sa.update(_sessions).where(_sessions.c.session_id == sa.bindparam("sid")).values(root_id=sa.bindparam("root"))
    )
    rows = [{"sid": session_id, "root": root} for session_id, root in roots.items()]
    for at in range(0, len(rows), PAGE):
        connection.execute(change, rows[at : at + PAGE])
