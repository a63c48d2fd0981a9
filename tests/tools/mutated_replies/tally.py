"""What happened, by class of mutation, and the table of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

from tests.tools.mutated_replies.mutate import CLASSES

SHOWN = 4
"""Failures of one sort that are shown."""


@dataclass(slots=True)
class Count:
    """Replies of one class. `strict`: 502s in which our reader finds nothing wrong."""

    accepted: int = 0
    refused: int = 0
    strict: int = 0
    crashed: int = 0
    failed: int = 0

    @property
    def replies(self) -> int:
        """All that were answered as they may be."""
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
    """`reasons`: what the server's 502s said where our reader found nothing, digits as N, with a reply's number."""

    counts: dict[str, Count] = field(default_factory=lambda: {kind: Count() for kind in CLASSES})
    failures: list[Failure] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, int] = field(default_factory=dict)
    refusals: int = 0
    good_after: int = 0
    sessions: int = 0
    problems: list[str] = field(default_factory=list)

    def strict(self, kind: str, message: str, number: int) -> bool:
        """Count a refusal of what our reader takes to be sound. Is it the first for this reason?"""
        self.counts[kind].strict += 1
        rule = re.sub(r"\d+", "N", message.partition("malformed reply: ")[2] or message)
        self.reasons[rule] += 1
        return self.examples.setdefault(rule, number) == number

    def fail(self, failure: Failure) -> None:
        """Note it, and count it with its class where it is one reply's."""
        self.failures.append(failure)
        if failure.number is not None:
            self.counts[failure.kind].failed += 1

    @property
    def total(self) -> Count:
        """All classes together."""
        return Count(*map(sum, zip(*map(astuple, self.counts.values()), strict=True)))

    @property
    def sound(self) -> bool:
        """Nothing happened that must not."""
        return not self.failures and not self.problems

    def lines(self) -> list[str]:
        """The table, the refusals to be judged by a person, and what failed."""
        rows = [(kind, count) for kind, count in self.counts.items() if count.replies or count.failed]
        cells = [_row(kind, count) for kind, count in [*rows, ("total", self.total)]]
        head = ("class of mutation", "replies", "200", "502", "502, sound to us", "crashes", "failures")
        widths = [max(len(row[place]) for row in [head, *cells]) for place in range(len(head))]
        lines = [_line(row, widths) for row in [head, *cells]]
        if self.reasons:
            lines += ["", "refused, though our reader finds nothing wrong (an example: strict-<number>.reply):"]
            lines += [f"{count:7}  {rule}  ({self.examples[rule]})" for rule, count in self.reasons.most_common()]
        return [*lines, "", *self._failures(), *self.problems]

    def _failures(self) -> list[str]:
        """A few of every sort."""
        sorts: dict[str, list[Failure]] = {}
        for failure in self.failures:
            sorts.setdefault(re.sub(r"\d+", "N", failure.what), []).append(failure)
        lines: list[str] = []
        for same in sorts.values():
            lines += map(str, same[:SHOWN])
            if len(same) > SHOWN:
                lines.append(f"  and {len(same) - SHOWN} more like it")
        return lines


def _row(kind: str, count: Count) -> tuple[str, ...]:
    numbers = (count.replies, count.accepted, count.refused, count.strict, count.crashed, count.failed)
    return (kind, *map(str, numbers))


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (cell.ljust(width) if not place else cell.rjust(width)
                    for place, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
    return "  ".join((first, *rest)).rstrip()
