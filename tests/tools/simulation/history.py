"""What clients were told, and what in it contradicts itself: the simulation and the state machine are judged by it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence

import msgspec

from app.turn.in_flight import hash_key
from ops.verify import Acknowledged as Told

SOON_S = 0.05
"""Attempts that came within so many seconds may count as later ones (`app.turn.retries.AGE_ERROR_S`)."""


class Acknowledged(msgspec.Struct, frozen=True):
    """A turn's reply that left a process. Times are the loop's; `key` is the idempotency key as the client chose it.
    `came_at` is when the request's bytes came, `retry_count` that of an attempt in a linear session."""

    session_id: str
    turn: int
    body: bytes
    logical: str
    key: str | None
    replayed: bool
    asked_at: float
    sent_at: float
    retry_count: int = 0
    came_at: float = 0.0

    def told(self) -> Told:
        """What the store is audited for."""
        key = None if self.key is None else hash_key(self.key)
        return Told(self.session_id, self.turn, hashlib.sha256(self.body).hexdigest(), key)


class Fact(msgspec.Struct, frozen=True):
    """Something else that was acknowledged: a creation, a reward (its value), a close, an erasure."""

    session_id: str
    what: str
    asked_at: float
    sent_at: float
    value: float = 0.0


class Seen(msgspec.Struct, frozen=True):
    """A read of an open session: the turns that it had committed."""

    session_id: str
    turns: frozenset[int]
    asked_at: float
    sent_at: float


class History:
    """Everything that was acknowledged in a schedule. `now` is the loop's time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._turns: dict[str, list[Acknowledged]] = {}
        self.facts: list[Fact] = []
        self._restored_at = -1.0
        self.problems: list[str] = []

    def problem(self, what: str) -> None:
        self.problems.append(f"{what} (at {self.now():.3f})")

    def turn(self, turn: Acknowledged) -> None:
        """Raises nothing: what is wrong is a problem of the schedule."""
        mine = self._turns.setdefault(turn.session_id, [])
        for earlier in mine:
            same = earlier.turn == turn.turn
            if same and earlier.body != turn.body and _bare(earlier.body) != _bare(turn.body):
                self.problem(f"turn {turn.turn} of {turn.session_id} was acknowledged twice, with different replies")
            if same and earlier.logical != turn.logical:
                self.problem(f"turn {turn.turn} of {turn.session_id} answered {earlier.logical} and {turn.logical}")
            is_current = earlier.asked_at > self._restored_at
            if turn.key is not None and earlier.key == turn.key and not same and is_current:
                self.problem(f"key {turn.key} was answered with turns {earlier.turn} and {turn.turn}")
            if earlier.logical == turn.logical and turn.key is None and is_current and not turn.replayed:
                is_late = turn.came_at + SOON_S < earlier.came_at and earlier.turn < turn.turn
                if is_late and not earlier.replayed and earlier.retry_count > turn.retry_count:
                    self.problem(f"turn {turn.turn} of {turn.session_id}, a late attempt, undid turn {earlier.turn}")
            if not turn.replayed and earlier.sent_at < turn.asked_at and earlier.turn >= turn.turn:
                self.problem(f"turn {turn.turn} of {turn.session_id} was asked for after turn {earlier.turn} was there")
        self._not_after_an_end(turn.session_id, turn.asked_at, f"turn {turn.turn} was answered")
        mine.append(turn)

    def fact(self, fact: Fact) -> None:
        if fact.what == "created":
            self._not_after_an_end(fact.session_id, fact.asked_at, "a creation was answered 200")
        self.facts.append(fact)

    def read(self, seen: Seen) -> None:
        """Every turn that was acknowledged before the question must be in the answer."""
        before = (turn for turn in self.turns_of(seen.session_id) if turn.sent_at < seen.asked_at)
        known = {turn.turn for turn in before if turn.asked_at > self._restored_at}
        if not known <= seen.turns:
            self.problem(
                f"a read of {seen.session_id} lacks turns {sorted(known - seen.turns)}, which were there before"
            )
        self._not_after_an_end(seen.session_id, seen.asked_at, "it was read as open")

    def restored(self) -> None:
        """The store was taken back: what clients were told of turns and closes is still stored, but holds no more."""
        self._restored_at = self.now()

    def turns_of(self, session_id: str) -> Sequence[Acknowledged]:
        return self._turns.get(session_id, ())

    @property
    def turns(self) -> list[Acknowledged]:
        return [turn for turns in self._turns.values() for turn in turns]

    def ended(self, session_id: str) -> str | None:
        """`closed` or `erased`, if a client was told so."""
        found = {fact.what for fact in self.facts if fact.session_id == session_id}
        return "erased" if "erased" in found else "closed" if "closed" in found else None

    def _not_after_an_end(self, session_id: str, asked_at: float, what: str) -> None:
        for fact in self.facts:
            is_over = fact.what == "erased" or (fact.what == "closed" and fact.asked_at > self._restored_at)
            if fact.session_id == session_id and is_over and fact.sent_at < asked_at:
                self.problem(f"{session_id} was {fact.what}, and afterwards {what}")
                return


def _bare(body: bytes) -> bytes:
    """A reply as it is given once its payload has left the window."""
    return re.sub(rb'("routed_experts":)"[^"]*"', rb"\1null", body)
