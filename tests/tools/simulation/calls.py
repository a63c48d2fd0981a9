"""What clients of a session asked, when, and what they were told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

Message: TypeAlias = tuple[str, str]
"""Role and text."""


@dataclass(frozen=True)
class Create:
    """`POST /sessions`."""


@dataclass(frozen=True)
class Chat:
    """One chat request: its whole history, what its body hashes to, its Idempotency-Key, agent, and count of retries.

    `number` is that of the turn that was opened for it; None where that is not known, 0 where none was.
    """

    messages: tuple[Message, ...]
    body: str
    key: str | None = None
    agent: str | None = None
    retry_count: int = 0
    number: int | None = None

    @property
    def is_marked(self) -> bool:
        """Does it count as a retry by its mark alone?"""
        return self.retry_count > 0 and self.key is None

    def repeats(self, other: Chat) -> bool:
        """Is it a retry of the other, by its key or its mark?"""
        if self.key is not None:
            return self.key == other.key
        return self.is_marked and (self.body, self.agent) == (other.body, other.agent)


@dataclass(frozen=True)
class Close:
    """`DELETE /sessions/{id}`; or that of its root, `with_root`, which closes the session unless it has ended."""

    with_root: bool = False


@dataclass(frozen=True)
class Erase:
    """`DELETE /sessions/{id}?erase=true`; or that of its root, `with_root`."""

    with_root: bool = False


@dataclass(frozen=True)
class Reward:
    """`PUT /sessions/{id}/reward`."""


@dataclass(frozen=True)
class Look:
    """`GET /sessions/{id}`: the live turns, or of all turns the numbers."""


@dataclass(frozen=True)
class Audit:
    """`GET /sessions/{id}/events`: every turn that was ever committed, and whether the session is closed."""


@dataclass(frozen=True)
class Taken:
    """A 200 to a chat: which turn it is, its message, a hash of its bytes, and whether it says that it was replayed."""

    turn: int
    text: str
    digest: str
    replayed: bool = False


@dataclass(frozen=True)
class Shown:
    """A 200 to a look: the history that the newest turn ends."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Numbers:
    """A 200 to a look: the numbers of all turns."""

    turns: frozenset[int]


@dataclass(frozen=True)
class Told:
    """A 200 to an audit: of each committed turn its number, its parent's, and its request's body."""

    turns: tuple[tuple[int, int, str], ...]
    closed: bool


@dataclass(frozen=True)
class Done:
    """A 204, or a 200 that says no more."""


@dataclass(frozen=True)
class Refused:
    """An error; `code` is that of docs/api.md."""

    status: int
    code: str


Request = Create | Chat | Close | Erase | Reward | Look | Audit
Reply = Taken | Shown | Numbers | Told | Done | Refused

UNCHANGED = frozenset(
    {
        *("upstream_invalid", "upstream_unreachable", "upstream_timeout", "upstream_error", "engines_failed"),
        *("worker_crash", "generation_aborted", "session_open_failed", "no_upstream", "overloaded"),
        "client_disconnected",
        "session_finished",
    }
)
"""Codes that say of nothing but the engines, or that a turn was not begun: they change nothing, whenever they come.
`upstream_error` stands for an engine's own error, which has its own code. That a session was finished is judged by its
drill (`finished`)."""


@dataclass(frozen=True)
class Call:
    """`reply` None, or a 5xx that leaves that open: it may have taken effect at any moment since `start`, or never."""

    start: float
    end: float
    request: Request
    reply: Reply | None

    @property
    def is_open(self) -> bool:
        reply = self.reply
        return reply is None or (isinstance(reply, Refused) and reply.status >= 500 and reply.code not in UNCHANGED)

    @property
    def until(self) -> float:
        return math.inf if self.is_open else self.end
