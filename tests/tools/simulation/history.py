"""What clients were told, and what in it contradicts itself: the simulation is judged by it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from app.domain.events import SessionConfig, TurnOpened
from app.errors import AppError
from app.turn.in_flight import InFlightTurn, hash_key
from ops.verify import Acknowledged as Told
from tests.tools.simulation.calls import Call, Chat, Refused, Reply, Request

T = TypeVar("T")

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


class Asked:
    """A call that a process has begun with, and from `end` on what it has answered, whoever heard of that.

    One that a killed process was at stays open: what it has sent to the database may still be done. `process` is its
    name; of a chat there is the `turn`, and `version` of the session's log when it came.
    """

    def __init__(
        self, session_id: str, request: Request, process: str, start: float, turn: InFlightTurn | None, version: int
    ) -> None:
        self.session_id = session_id
        self.request = request
        self.process = process
        self.start = start
        self.turn = turn
        self.version = version
        self.end = math.inf
        self.reply: Reply | None = None

    @property
    def opened(self) -> TurnOpened | None:
        """Of the turn, once it has its claim."""
        claim = None if self.turn is None else self.turn.claim
        return claim.event if claim is not None and isinstance(claim.event, TurnOpened) else None

    def call(self) -> Call:
        """As it is known by now."""
        request = self.request
        if isinstance(request, Chat) and self.turn is not None:
            request = replace(request, number=0 if self.opened is None else self.opened.turn)
        return Call(self.start, self.end, request, self.reply)


class Site(msgspec.Struct, frozen=True):
    """A session that a client has created. `is_tree` where its first turn says so, too."""

    config: SessionConfig
    is_tree: bool


class History:
    """Everything that was asked and acknowledged in a schedule. `now` is the loop's time.

    `sessions` are those that clients have asked to create, `crashes` when the database crashed. `closes_idle`: the
    janitor does. `is_searched`: the calls so far have been, as before the store is taken back. `searched` counts the
    sessions whose calls have an order, `unsearched` those of which that would take too long to find out.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.sessions: dict[str, Site] = {}
        self.asked: dict[str, list[Asked]] = {}
        self.crashes: list[float] = []
        self.closes_idle = False
        self.is_searched = False
        self.searched = self.unsearched = 0
        self._turns: dict[str, list[Acknowledged]] = {}
        self.facts: list[Fact] = []
        self._restored_at = -1.0
        self.problems: list[str] = []

    def problem(self, what: str) -> None:
        self.problems.append(f"{what} (at {self.now():.3f})")

    def ask(
        self, session_id: str, request: Request, process: str, turn: InFlightTurn | None = None, version: int = 0
    ) -> Asked:
        """A process begins with a call."""
        asked = Asked(session_id, request, process, self.now(), turn, version)
        self.asked.setdefault(session_id, []).append(asked)
        return asked

    async def answer(self, asked: Asked, work: Awaitable[T], reply: Callable[[T], Reply]) -> T:
        """Write down what the process answers. Raises as the work."""
        try:
            found = await work
        except AppError as error:
            asked.reply, asked.end = Refused(error.status, error.code), self.now()
            raise
        asked.reply, asked.end = reply(found), self.now()
        return found

    def crashed_since(self, moment: float) -> bool:
        """Has the database crashed since then?"""
        return bool(self.crashes) and self.crashes[-1] >= moment

    def turn(self, turn: Acknowledged) -> None:
        """Raises nothing: what is wrong is a problem of the schedule."""
        mine = self._turns.setdefault(turn.session_id, [])
        for earlier in mine:
            same = earlier.turn == turn.turn
            if same and earlier.body != turn.body and bare(earlier.body) != bare(turn.body):
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


def bare(body: bytes) -> bytes:
    """A reply as it is given once its payload has left the window."""
    return re.sub(rb'("routed_experts":)"[^"]*"', rb"\1null", body)


class _Errors(logging.Handler):
    def __init__(self, history: History) -> None:
        super().__init__(logging.ERROR)
        self._history = history

    def emit(self, record: logging.LogRecord) -> None:
        fault = "" if record.exc_info is None else f": {record.exc_info[1]!r}"
        self._history.problem(f"the log has an error: {record.getMessage()}{fault}")


@contextlib.contextmanager
def expecting_no_errors(history: History) -> Iterator[None]:
    """Each that is logged is a problem of the schedule."""
    logs = _Errors(history)
    logger = logging.getLogger("turnlog")
    logger.addHandler(logs)
    propagated, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(logs)
        logger.propagate = propagated
