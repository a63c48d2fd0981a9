"""What happened, by class of mutation."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

from tests.tools.mutated_replies.mutate import CLASSES


@dataclass(slots=True)
class Count:
    """Replies of one class, by how they were answered."""

    accepted: int = 0
    refused: int = 0
    crashed: int = 0

    @property
    def replies(self) -> int:
        return self.accepted + self.refused + self.crashed


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that must not be, and how to see it again. `number`: the reply's; None where it is no single one's."""

    phase: str
    session: int
    number: int | None
    kind: str
    what: str
    again: str

    def __str__(self) -> str:
        reply = "a session" if self.number is None else f"reply {self.number} ({self.kind})"
        return f"{self.phase}, session {self.session}, {reply}: {self.what} ({self.again})"


@dataclass(slots=True)
class Tally:
    """`good_after`: sound turns right behind a refusal."""

    counts: dict[str, Count] = field(default_factory=lambda: {kind: Count() for kind in CLASSES})
    failures: list[Failure] = field(default_factory=list)
    good_after: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def total(self) -> Count:
        """All classes together."""
        return Count(*map(sum, zip(*map(astuple, self.counts.values()), strict=True)))

    def lines(self) -> list[str]:
        """The classes that were tried, and what failed."""
        counts = [f"{kind}: {count}" for kind, count in {**self.counts, "total": self.total}.items() if count.replies]
        return [*counts, *map(str, self.failures), *self.problems]
