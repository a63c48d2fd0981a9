"""Adds a session's note and tags to its head, for lists of sessions.

No earlier release writes the event `SessionNoted`, so a first upgrade has nothing to fill in. A downgrade leaves a mark
if there are notes; the next upgrade then reads them from the log.

Revision: 0015, after 0014.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

PAGE = 2000
"""Events in memory at the same time."""

MARK = "notes_in_log"
"""Key in `store_meta` of a store that was taken down from this revision with notes in it."""

_TAGGED = sa.text("tags IS NOT NULL")
_HAS_NOTE = "(note IS NOT NULL OR tags IS NOT NULL)"

_events = sa.table(
    "events",
    sa.column("session_id", sa.String),
    sa.column("seq", sa.BigInteger),
    sa.column("type", sa.String),
    sa.column("data", sa.LargeBinary),
)
_sessions = sa.table(
    "sessions",
    sa.column("session_id", sa.String),
    sa.column("status", sa.String),
    sa.column("note", sa.Text),
    sa.column("tags", sa.Text),
)


def upgrade() -> None:
    op.add_column("sessions", sa.Column("note", sa.Text))
    op.add_column("sessions", sa.Column("tags", sa.Text))
    op.create_index(
        "ix_sessions_tagged",
        "sessions",
        ["created_at", "session_id"],
        sqlite_where=_TAGGED,
        postgresql_where=_TAGGED,
    )
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        # What the planner wants to know of a column would be its content, which an erasure must reach.
        for column in ("note", "tags"):
            op.execute(f"ALTER TABLE sessions ALTER COLUMN {column} SET STATISTICS 0")
    if connection.execute(sa.text("DELETE FROM store_meta WHERE key = :key"), {"key": MARK}).rowcount:
        _fill(connection)


def downgrade() -> None:
    """The notes stay in the log. Refuses while an archived session has one: its log is not in the database."""
    connection = op.get_bind()
    archived = f"""SELECT count(*) FROM sessions JOIN archived_sessions ON archived_sessions.session_id =
        sessions.session_id WHERE archive_id IS NOT NULL AND {_HAS_NOTE}"""
    left = connection.execute(sa.text(archived)).scalar_one()
    if left:
        raise RuntimeError(
            f"{left} archived sessions have a note or tags: restore them first (turnlog archive restore)"
        )
    if connection.execute(sa.text(f"SELECT 1 FROM sessions WHERE {_HAS_NOTE} LIMIT 1")).first():
        connection.execute(sa.text("INSERT INTO store_meta (key, value) VALUES (:key, '1')"), {"key": MARK})
    op.drop_index("ix_sessions_tagged", "sessions")
    op.drop_column("sessions", "tags")
    op.drop_column("sessions", "note")


def _fill(connection: sa.Connection) -> None:
    change = (
        sa.update(_sessions)
        .where(_sessions.c.session_id == sa.bindparam("sid"), _sessions.c.status != "erased")
        .values(note=sa.bindparam("new_note"), tags=sa.bindparam("new_tags"))
    )
    for session_id, note, tags in _noted(connection):
        text = "\n" + "\n".join(tags) + "\n" if tags else None
        connection.execute(change, {"sid": session_id, "new_note": note or None, "new_tags": text})


def _noted(connection: sa.Connection) -> Iterator[tuple[str, str | None, list[str]]]:
    """Sessions with their last note and tags. A restore takes both back; those of its time follow it."""
    last: str | None = None
    note: str | None = None
    tags: list[str] = []
    for session_id, kind, fields in _log(connection):
        if session_id != last:
            if last is not None:
                yield last, note, tags
            last, note, tags = session_id, None, []
        if kind == "SessionRestored":
            note, tags = None, []
            continue
        note = fields.get("note", note)
        tags = fields.get("tags", tags)
    if last is not None:
        yield last, note, tags


def _log(connection: sa.Connection) -> Iterator[tuple[str, str, dict[str, Any]]]:
    key = sa.tuple_(_events.c.session_id, _events.c.seq)
    query = (
        sa.select(_events.c.session_id, _events.c.seq, _events.c.type, _events.c.data)
        .where(_events.c.type.in_(("SessionNoted", "SessionRestored")))
        .order_by(_events.c.session_id, _events.c.seq)
        .limit(PAGE)
    )
    after: tuple[str, int] = "", 0
    while page := list(connection.execute(query.where(key > after))):
        for session_id, _, kind, data in page:
            yield session_id, kind, _fields(data)
        after = page[-1][0], page[-1][1]


def _fields(data: bytes) -> dict[str, Any]:
    """An event's JSON, which is followed by a checksum. Empty if it is damaged."""
    try:
        fields = json.JSONDecoder().raw_decode(data.decode())[0]
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
