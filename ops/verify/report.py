"""What a verification was told, and what it found."""

from __future__ import annotations

import msgspec

STORE = "(store)"
"""Stands for a session's id in a problem that is no single session's; no id has parentheses."""


class Acknowledged(msgspec.Struct, frozen=True):
    """A turn that a client holds a 200 for. `reply_sha256`: hex, of the body as it got it; None: not compared.

    The body of a streamed reply is made from the stored one and has no bytes of its own to compare. `retry_key` is what
    the log keeps of the request's Idempotency-Key; None: not compared.
    """

    session_id: str
    turn: int
    reply_sha256: str | None = None
    retry_key: str | None = None


class Problem(msgspec.Struct, frozen=True):
    session_id: str
    what: str


class Report(msgspec.Struct):
    """What was looked at, and everything that is not as the log says.

    `missing` are acknowledged turns that are not in the log, or whose reply is another by now; each is a problem too.
    `not_compared` counts those in the log whose reply cannot be put together any more: payloads that were tombstoned,
    sessions that were erased. Of the `groups` there are `noted_groups` that a note says are still to be brought up to
    date, which happens when the feed is asked: what is stored of those is not compared. Of `unreadable` sessions there
    are rows, and of `damaged_tables` pages, that the database cannot read.
    """

    sessions: int = 0
    events: int = 0
    turns: int = 0
    groups: int = 0
    noted_groups: int = 0
    problems: list[Problem] = []
    missing: list[Acknowledged] = []
    not_compared: int = 0
    unreadable: list[str] = []
    damaged_tables: list[str] = []

    def found(self, session_id: str, what: str) -> None:
        self.problems.append(Problem(session_id, what))

    def damage(self) -> list[str]:
        """The lines that sum up what the database cannot read."""
        tables = [f"damaged tables: {', '.join(self.damaged_tables)}"] if self.damaged_tables else []
        sessions = [f"sessions with unreadable rows: {', '.join(self.unreadable)}"] if self.unreadable else []
        return tables + sessions

    def summary(self) -> str:
        seen = f"{self.sessions} sessions, {self.events} events, {self.turns} turns, {self.groups} groups"
        noted = f" ({self.noted_groups} not compared: they have just changed)" if self.noted_groups else ""
        return f"{seen}{noted}: {len(self.problems)} problems"
