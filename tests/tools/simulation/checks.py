"""What must hold of the store at the end of a schedule, whatever has happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import select

from app.domain.events import (
    AnnotationWritten,
    BlobsTombstoned,
    Recorded,
    RewardAssigned,
    RolloutJoined,
    SessionClosed,
    SessionErased,
    SessionRestored,
    TurnCommitted,
    TurnOpened,
    UnknownEvent,
    name_of,
)
from app.domain.restore import in_effect
from app.store import repair
from app.store.database import Database as RealDatabase
from app.store.schema import open_turns
from app.store.sessions import load_head
from ops.verify import TABLES, verify
from tests.tools.simulation import orders
from tests.tools.simulation.calls import Taken
from tests.tools.simulation.history import History
from tests.tools.simulation.store import ReadDatabase, Store

T = TypeVar("T")

AFTER_THE_END = (SessionErased, BlobsTombstoned, RewardAssigned, RolloutJoined, AnnotationWritten, SessionRestored)
"""What may still happen to a session that is closed."""


LOOK_S = 0.5


def is_ended(store: Store, session_id: str) -> bool:
    head = store.read(lambda connection: load_head(connection, session_id))
    return head is not None and head.status != "open"


async def none_open(store: Store) -> None:
    """Wait until no session has an open turn."""
    while store.read(lambda connection: connection.execute(select(open_turns.c.fence).limit(1)).first()):
        await asyncio.sleep(LOOK_S)


def look(store: Store, history: History) -> None:
    """At any moment heads and open turns are what the logs say. What is wrong becomes a problem of the history."""
    for session_id in store.read(lambda connection: repair.session_ids(connection, repair.DERIVED, "", 1000)):
        found = store.read(lambda connection: repair.examine(connection, session_id))  # noqa: B023
        for difference in found.differences:
            history.problem(f"meanwhile: {session_id}: {difference}")


async def judge(store: Store, history: History, note: Callable[[str], None]) -> None:
    """Everything that is wrong becomes a problem of the history."""
    database = ReadDatabase(store)
    told = [turn.told() for turn in history.turns]
    for problem in (await verify(cast(RealDatabase, database), acknowledged=told)).problems:
        history.problem(f"verify: {problem.session_id}: {problem.what}")
    held = store.read(lambda connection: list(connection.execute(select(open_turns.c.session_id, open_turns.c.fence))))
    for session_id, fence in held:
        history.problem(f"the claim {fence} of {session_id} was never let go")
    known = store.read(lambda connection: repair.session_ids(connection, TABLES, "", 1000))
    for session_id in sorted({*known, *(turn.session_id for turn in history.turns)}):
        _Session(store, session_id, history, note).judge()
    orders.judge(store, history)


class _Session:
    def __init__(self, store: Store, session_id: str, history: History, note: Callable[[str], None]) -> None:
        self._store = store
        self._session_id = session_id
        self._history = history
        self._note = note
        self._log: Sequence[Recorded] = ()

    def _must(self, good: bool, what: str) -> None:
        if not good:
            self._history.problem(f"{self._session_id}: {what}")

    def judge(self) -> None:
        try:
            self._log = self._store.log(self._session_id)
        except UnknownEvent as error:
            self._must(False, f"the log cannot be read: {error}")
            return
        for recorded in self._log:
            self._note(f"{self._session_id} {recorded.seq} {name_of(recorded.event)} {_brief(recorded.event)}")
        self._order()
        self._claims()
        self._ends()
        self._facts()

    def _order(self) -> None:
        """Under a key that was committed there is no further claim, unless the turn was undone."""
        done: set[str] = set()
        for recorded in in_effect(self._log):
            match recorded.event:
                case TurnCommitted(retry_key=str(key)):
                    done.add(key)
                case TurnOpened(retry_key=str(key)):
                    self._must(key not in done, f"event {recorded.seq} opens a turn whose key was committed before")

    def _claims(self) -> None:
        """A turn that was answered had the claim under its fence, and not another turn."""
        opened = {recorded.seq: recorded for recorded in self._log}
        for asked in self._history.asked.get(self._session_id, ()):
            claim = None if asked.turn is None else asked.turn.claim
            if claim is None or claim.seq not in opened or not isinstance(asked.reply, Taken) or asked.reply.replayed:
                continue
            is_own = opened[claim.seq] == claim
            self._must(is_own, f"turn {asked.reply.turn} was answered, and had lost its claim")

    def _ends(self) -> None:
        ended = False
        for recorded in in_effect(self._log):
            late = ended and not isinstance(recorded.event, AFTER_THE_END)
            self._must(not late, f"event {recorded.seq} came after the session was closed")
            ended = ended or isinstance(recorded.event, SessionClosed)

    def _facts(self) -> None:
        types = {name_of(recorded.event) for recorded in self._log}
        rewards = {recorded.event.reward for recorded in self._log if isinstance(recorded.event, RewardAssigned)}
        named = {"created": "SessionCreated", "closed": "SessionClosed", "erased": "SessionErased"}
        for fact in self._history.facts:
            if fact.session_id == self._session_id and fact.what in named:
                self._must(named[fact.what] in types, f"was {fact.what}, and the log does not know")
            elif fact.session_id == self._session_id:
                self._must(fact.value in rewards, f"the reward {fact.value} is lost")


def _brief(event: Any) -> str:
    names = ("turn", "parent", "fence", "incarnation", "reason", "to_turn", "reward")
    return " ".join(f"{name}={getattr(event, name)}" for name in names if getattr(event, name, None) is not None)
