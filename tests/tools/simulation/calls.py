"""What clients of a session asked, when, and what they were told."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

Message: TypeAlias = tuple[str, str]
"""Role and text."""


@dataclass(frozen=True)
class Chat:
    """One chat request: its whole history, what its body hashes to, and its Idempotency-Key."""

    messages: tuple[Message, ...]
    body: str
    key: str | None = None


@dataclass(frozen=True)
class Close:
    """`DELETE /sessions/{id}`."""


@dataclass(frozen=True)
class Look:
    """`GET /sessions/{id}`: the live turns."""


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
class Seen:
    """A 200 to a look: the texts of the live turns' replies."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Told:
    """A 200 to an audit: of each committed turn its number, its parent's, and its request's body."""

    turns: tuple[tuple[int, int, str], ...]
    closed: bool


@dataclass(frozen=True)
class Done:
    """A 204."""


@dataclass(frozen=True)
class Refused:
    """An error; `code` is that of docs/api.md."""

    status: int
    code: str


Request = Chat | Close | Look | Audit
Reply = Taken | Seen | Told | Done | Refused


@dataclass(frozen=True)
class Call:
    """`reply` None, or a 5xx: it may have taken effect at any moment since `start`, or never."""

    start: float
    end: float
    request: Request
    reply: Reply | None

    @property
    def is_open(self) -> bool:
        return self.reply is None or (isinstance(self.reply, Refused) and self.reply.status >= 500)

    @property
    def until(self) -> float:
        return math.inf if self.is_open else self.end
