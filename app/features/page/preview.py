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
from app.export.row import Fields
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
    """The excluded rows of one reason."""

    reason: str
    count: int = 0
    cut_tokens: int = 0
    examples: list[Example] = []


class Preview(msgspec.Struct, frozen=True):
    """Of `scanned` sessions: the rows that the export would have, of how many sessions, with how many tokens.

    `first_tokens` are the tokens of each of its first rows. `complete`: these are all; otherwise `cursor` resumes after
    them.
    """

    rows: int
    sessions: int
    tokens: int
    sampled_tokens: int
    first_tokens: Sequence[int]
    missing: Sequence[Missing]
    scanned: int
    complete: bool
    cursor: str | None


class _Counts:
    def __init__(self) -> None:
        self.rows = self.tokens = self.sampled_tokens = 0
        self.first_tokens: list[int] = []
        self.given: set[str] = set()
        self.scanned: set[str] = set()
        self.cursor: str | None = None
        self.missing: dict[str, Missing] = {}

    def add(self, row: Fields) -> None:
        fields = cast(Mapping[str, Any], row)
        self.cursor = fields["cursor"]
        if EXCLUDED in fields:
            self._leave_out(fields)
            return
        self.rows += 1
        if self.rows <= FIRST_ROWS:
            self.first_tokens.append(fields["tokens"])
        self.tokens += fields["tokens"]
        self.sampled_tokens += fields["sampled_tokens"]
        self.given.update(fields["sessions"])
        self.scanned.update(fields["sessions"])

    def _leave_out(self, fields: Mapping[str, Any]) -> None:
        """Reasons are counted by their name, the part before the colon; the case follows it."""
        self.scanned.add(fields["session_id"])
        detail: str = fields[EXCLUDED]
        reason = detail.partition(": ")[0]
        if reason not in self.missing and len(self.missing) >= MAX_REASONS:
            reason = OTHER
        missing = self.missing.setdefault(reason, Missing(reason))
        missing.count += 1
        missing.cut_tokens += fields.get("cut_tokens", 0)
        if len(missing.examples) < EXAMPLES:
            missing.examples.append(Example(fields["session_id"], fields["segment"], fields["turn"], detail))


class Previews:
    """`release` is Turnlog's version."""

    def __init__(self, database: Database, release: str) -> None:
        self._exporter = Exporter(database, release, counts_only=True)

    async def of(self, query: ExportQuery, cursor: str | None) -> Preview:
        """Raises as `Exporter.start`."""
        query = query.model_copy(update={"explain": True, "replay": False, "limit": None})
        counts, complete = _Counts(), True
        until = time.monotonic() + MAX_S
        async with aclosing(await self._exporter.pages(query, cursor)) as pages:
            async for rows in pages:
                for row in rows:
                    counts.add(row)
                if len(counts.scanned) >= MAX_SESSIONS or time.monotonic() >= until:
                    complete = False
                    break
        return Preview(
            rows=counts.rows,
            sessions=len(counts.given),
            tokens=counts.tokens,
            sampled_tokens=counts.sampled_tokens,
            first_tokens=counts.first_tokens,
            missing=sorted(counts.missing.values(), key=lambda one: -one.count),  # the most frequent reason first
            scanned=len(counts.scanned),
            complete=complete,
            cursor=None if complete else counts.cursor,
        )
