"""Counts what an export would contain, and why it would exclude the rest, without its rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec

from app.export.exporter import Exporter
from app.export.formats import EXCLUDED
from app.export.query import ExportQuery
from app.store.database import Database

MAX_SESSIONS = 2_000
MAX_S = 2.0
"""A preview ends after so many sessions; another call continues it."""

MAX_REASONS = 200
OTHER = "other reasons"

EXAMPLES = 20
FIRST_ROWS = 3


class Example(msgspec.Struct, frozen=True):
    """A row that is not in the export, with the full reason."""

    session_id: str
    segment: int | None
    turn: int | None
    detail: str


class Missing(msgspec.Struct):
    """The excluded rows of one reason, and the sampled tokens that it takes."""

    reason: str
    count: int = 0
    lost_tokens: int = 0
    examples: list[Example] = []


class Preview(msgspec.Struct, frozen=True):
    """Of `scanned` sessions: the rows that the export would have, of how many sessions, with how many tokens, and how
    many of these are in the loss.

    `first_tokens` are the tokens of each of its first rows. `complete`: these are all; otherwise `cursor` resumes after
    them.
    """

    rows: int
    sessions: int
    tokens: int
    trained_tokens: int
    first_tokens: Sequence[int]
    missing: Sequence[Missing]
    scanned: int
    complete: bool
    cursor: str | None


class Previews:
    """`release` is Turnlog's version."""

    def __init__(self, database: Database, release: str) -> None:
        self._exporter = Exporter(database, release, counts_only=True)

    async def of(self, query: ExportQuery, cursor: str | None) -> Preview:
        """Raises as `Exporter.start`."""
        plain = {"explain": True, "replay": False, "routing": "newest", "limit": None}
        query = query.model_copy(update=plain)
        tokens, trained_tokens = list[int](), 0  # of each row, and of all
        given, scanned, missing = set[str](), set[str](), dict[str, Missing]()
        reached, until = None, time.monotonic() + MAX_S
        async with aclosing(await self._exporter.pages(query, cursor)) as pages:
            async for rows in pages:
                for row in rows:
                    fields = cast(Mapping[str, Any], row)
                    reached = fields["cursor"]
                    if EXCLUDED in fields:
                        scanned.add(fields["session_id"])
                        _leave_out(missing, fields)
                        continue
                    tokens.append(fields["tokens"])
                    trained_tokens += fields["trained_tokens"]
                    given.update(fields["sessions"])
                    scanned.update(fields["sessions"])
                if len(scanned) >= MAX_SESSIONS or time.monotonic() >= until:
                    break
            else:
                reached = None
        return Preview(
            rows=len(tokens),
            sessions=len(given),
            tokens=sum(tokens),
            trained_tokens=trained_tokens,
            first_tokens=tokens[:FIRST_ROWS],
            missing=sorted(missing.values(), key=lambda one: (-one.lost_tokens, -one.count)),
            scanned=len(scanned),
            complete=reached is None,
            cursor=reached,
        )


def _leave_out(missing: dict[str, Missing], fields: Mapping[str, Any]) -> None:
    """Reasons are counted by their name, the part before the colon; the case follows it."""
    detail: str = fields[EXCLUDED]
    reason = detail.partition(": ")[0]
    if reason not in missing and len(missing) >= MAX_REASONS:
        reason = OTHER
    counted = missing.setdefault(reason, Missing(reason))
    counted.count += 1
    counted.lost_tokens += fields["lost_tokens"] or 0
    if len(counted.examples) < EXAMPLES:
        counted.examples.append(Example(fields["session_id"], fields["segment"], fields["turn"], detail))
