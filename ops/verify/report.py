"""The input and the result of a verification."""

from __future__ import annotations

import msgspec

from turnlog.amounts import amount

STORE = "(store)"
"""Takes the place of a session id in a problem that concerns no single session; a real id has no parentheses."""


class Acknowledged(msgspec.Struct, frozen=True):
    """A turn for which a client received a 200. `turn` 0: the one under `retry_key`, as a live stream does not name its
    turn. `reply_sha256` is the hex hash of the body; None: not compared.

    The body of a streamed reply is generated from the stored one, so its bytes are not compared. `retry_key` is the
    form in which the log keeps the request's Idempotency-Key; None: not compared.
    """

    session_id: str
    turn: int
    reply_sha256: str | None = None
    retry_key: str | None = None


class Problem(msgspec.Struct, frozen=True):
    session_id: str
    what: str


class Report(msgspec.Struct):
    """The counts of what was checked, and all problems found.

    `missing` are acknowledged turns that are not in the log or whose reply differs; each is also a problem.
    `not_compared` counts acknowledged turns whose reply cannot be restored, because payloads were tombstoned or the
    session was erased. `noted_groups` of the `groups` have changed and their rows are updated at the next read of the
    feed, so they were not compared. `unreadable` are sessions with rows, and `damaged_tables` tables with pages, that
    the database cannot read.
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

    def add(self, part: Report) -> None:
        """Add what another part of the check has found."""
        for name in self.__struct_fields__:
            value = getattr(part, name)
            if isinstance(value, list):
                getattr(self, name).extend(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def found(self, session_id: str, what: str) -> None:
        self.problems.append(Problem(session_id, what))

    def damage(self) -> list[str]:
        """Lines that summarize what the database cannot read."""
        tables = [f"damaged tables: {', '.join(self.damaged_tables)}"] if self.damaged_tables else []
        sessions = [f"sessions with unreadable rows: {', '.join(self.unreadable)}"] if self.unreadable else []
        return tables + sessions

    def summary(self) -> str:
        counts = f"{amount(self.events, 'event')}, {amount(self.turns, 'turn')}, {amount(self.groups, 'group')}"
        seen = f"{amount(self.sessions, 'session')}, {counts}"
        noted = f" ({self.noted_groups} not compared: they have just changed)" if self.noted_groups else ""
        return f"{seen}{noted}: {amount(len(self.problems), 'problem')}"
