"""The table of what engines have streamed of turns in flight, and what the kernel asks of it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import BigInteger, Column, Integer, MetaData, PrimaryKeyConstraint, String, Table, Text, delete, or_

from app.store.damage import Content
from app.store.dialect import ForEach, StorePoints, Tx
from app.store.schema import NAMING, SESSION_ID

metadata = MetaData(naming_convention=NAMING)

staged_tokens = Table(
    "staged_tokens",
    metadata,
    Column("session_id", SESSION_ID, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("number", Integer, nullable=False),
    Column("part", Integer, nullable=False),
    Column("request_hash", String(64), nullable=False),
    Column("engine", Text, nullable=False),
    Column("weight_version", Text),
    Column("logprobs_of", String(16)),
    Column("data", Content, nullable=False),
    PrimaryKeyConstraint("session_id", "fence", "number"),
)
"""What an engine has streamed of a turn in flight, in the order of `number`; each `data` is a compressed frame of the
stream's bytes. `part` counts the generations of the turn. It belongs to no turn until the turn is committed, which
deletes it; a retry with the same `request_hash` may go on from it if the turn has ended without a commit.
"""

_drop = ForEach(
    lambda given: delete(staged_tokens).where(
        staged_tokens.c.session_id == given.sid, or_(given.fenced.is_(None), staged_tokens.c.fence == given.fenced)
    ),
    sid=Text,
    fenced=BigInteger,
)
"""Of a turn; without a fence, of all turns of a session."""


def drop(tx: Tx, turns: Sequence[tuple[str, int | None]]) -> None:
    """Delete what was staged of each turn, a session and a fence; without a fence, of all turns of the session."""
    tx.each(_drop, [{"sid": session_id, "fenced": fence} for session_id, fence in turns])


def join(points: StorePoints) -> None:
    points.unstaged.append(drop)
    points.tables.append(staged_tokens)
