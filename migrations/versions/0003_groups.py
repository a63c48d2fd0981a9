"""Adds groups of sessions and the training feed's leases, and a session's attempt and largest weight version.

Revision: 0003, after 0002.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

log = logging.getLogger("turnlog.migrations")

PAGE = 2000
"""Events in memory at the same time."""

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
    sa.column("attempt", sa.Integer),
    sa.column("weight_version", sa.BigInteger),
)


def upgrade() -> None:
    op.create_table(
        "groups",
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("sessions", sa.Integer, nullable=False),
        sa.Column("erased", sa.Integer, nullable=False),
        sa.Column("unfinished", sa.Integer, nullable=False),
        sa.Column("completed_at", sa.Double),
        sa.Column("measured", sa.Boolean, nullable=False),
        sa.Column("oldest_version", sa.BigInteger),
        sa.Column("consumer", sa.String(128)),
        sa.Column("lease_until", sa.Double),
        sa.Column("handed_out", sa.Integer, nullable=False),
        sa.Column("acked_at", sa.Double),
        sa.PrimaryKeyConstraint("group_id", name="pk_groups"),
    )
    waiting = sa.text("acked_at IS NULL AND completed_at IS NOT NULL")
    op.create_index(
        "ix_groups_completed_at_group_id",
        "groups",
        ["completed_at", "group_id"],
        sqlite_where=waiting,
        postgresql_where=waiting,
    )
    unacknowledged = sa.text("acked_at IS NULL")
    op.create_index(
        "ix_groups_consumer", "groups", ["consumer"], sqlite_where=unacknowledged, postgresql_where=unacknowledged
    )
    op.create_index("ix_groups_acked_at_group_id", "groups", ["acked_at", "group_id"])
    op.create_table(
        "group_changes",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), sa.Identity(), nullable=False),
        sa.Column("group_id", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_group_changes"),
    )
    op.add_column("sessions", sa.Column("attempt", sa.Integer))
    op.add_column("sessions", sa.Column("weight_version", sa.BigInteger))
    _fill_sessions(op.get_bind())
    op.create_index("ix_sessions_weight_version", "sessions", ["weight_version"])
    # The first read of the feed creates the rows of the groups from these notes.
    op.execute("INSERT INTO group_changes (group_id) SELECT DISTINCT group_id FROM sessions WHERE group_id IS NOT NULL")


def downgrade() -> None:
    """Remove leases and acknowledgements: after a later upgrade, the feed hands out every group again.

    A group's completion time is then the last change of its sessions.
    """
    _tell_what_is_lost(op.get_bind())
    op.drop_index("ix_sessions_weight_version", "sessions")
    op.drop_column("sessions", "weight_version")
    op.drop_column("sessions", "attempt")
    op.drop_table("group_changes")
    op.drop_table("groups")


def _tell_what_is_lost(connection: sa.Connection) -> None:
    count = "SELECT count(*) FROM groups WHERE acked_at IS"
    leased = connection.scalar(sa.text(f"{count} NULL AND lease_until IS NOT NULL"))
    acknowledged = connection.scalar(sa.text(f"{count} NOT NULL"))
    if leased or acknowledged:
        log.warning(
            "downgrade to 0002: the leases of %d groups and the acknowledgements of %d are lost: "
            "after an upgrade the training feed hands these groups out again",
            leased,
            acknowledged,
        )


def _fill_sessions(connection: sa.Connection) -> None:
    found: dict[str, dict[str, int]] = {}
    for page in _pages(connection):
        for session_id, _, kind, data in page:
            known = found.setdefault(session_id, {})
            fields = _fields(data)
            if kind == "SessionCreated":
                if fields["config"].get("attempt") is not None:
                    known["attempt"] = fields["config"]["attempt"]
                continue
            sampled = (span["version"] for span in fields["weight_versions"] if span["end"] > span["start"])
            numbers = [int(version) for version in sampled if _is_number(version)]
            largest = max([*numbers, known.get("weight_version", -1)])
            if largest >= 0:
                known["weight_version"] = largest
        last = page[-1][0]
        _update(connection, {session_id: known for session_id, known in found.items() if session_id != last})
        found = {last: found[last]}
    _update(connection, found)


def _pages(connection: sa.Connection) -> Iterator[list[Any]]:
    """The `SessionCreated` and `TurnCommitted` events, ordered by session and sequence number."""
    place = sa.tuple_(_events.c.session_id, _events.c.seq)
    query = (
        sa.select(_events.c.session_id, _events.c.seq, _events.c.type, _events.c.data)
        .where(_events.c.type.in_(("SessionCreated", "TurnCommitted")))
        .order_by(_events.c.session_id, _events.c.seq)
        .limit(PAGE)
    )
    after = ("", 0)
    while page := list(connection.execute(query.where(place > after))):
        yield page
        after = (page[-1][0], page[-1][1])


def _fields(data: bytes) -> dict[str, Any]:
    """The fields of an event. After a downgrade, there are rows of later releases with a checksum after the JSON."""
    found: dict[str, Any] = json.JSONDecoder().raw_decode(data.decode())[0]
    return found


def _is_number(version: str) -> bool:
    """Whether the version is a number of 64 bits, by the rule of the release of this revision."""
    return version.isascii() and version.isdigit() and len(version) < 19


def _update(connection: sa.Connection, found: dict[str, dict[str, int]]) -> None:
    for session_id, values in found.items():
        if values:
            connection.execute(sa.update(_sessions).where(_sessions.c.session_id == session_id).values(values))
