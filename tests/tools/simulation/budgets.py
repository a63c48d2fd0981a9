"""Sessions with limits in a schedule: what they may use is never exceeded, and is all there until it is used."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, literal_column, select

from app.domain.events import (
    Event,
    LimitName,
    LimitReached,
    Limits,
    RolloutJoined,
    SessionClosed,
    SessionConfig,
    SessionCreated,
    SessionErased,
    TurnAbandoned,
    TurnCommitted,
    TurnOpened,
    TurnRejected,
)
from app.errors import OverBudget
from app.errors import SessionClosed as Closed
from app.store import feed
from app.store.feed import END, START, EventFilter
from app.store.schema import events, sessions
from app.store.sessions import EventRow, decode_events
from app.turn.in_flight import TurnReply
from tests.tools.simulation.client import Client, GaveUp, TreeClient
from tests.tools.simulation.history import History
from tests.tools.simulation.store import Store

SHARE = 0.2
"""Of the schedules; some of their sessions have limits."""

COUNTED: tuple[LimitName, ...] = ("turns", "tokens")

AGAIN_S = 1.0


class Spent(Closed):
    """A limit of the session is used up: for its clients that is its end."""


class LimitedClient(Client):
    """Learns when a limit is used up."""

    async def _take(self, *arguments: Any, **options: Any) -> TurnReply:
        try:
            return await super()._take(*arguments, **options)
        except OverBudget as error:
            self._note(f"{self.name}: {error}")
            raise Spent(str(error)) from error

    async def spend(self) -> None:
        """Take turns until nothing is left. Raises SessionClosed, SessionNotFound, and Spent when that has come."""
        while True:
            try:
                await self.turn()
            except GaveUp:
                await asyncio.sleep(AGAIN_S)


class LimitedTreeClient(LimitedClient, TreeClient):
    """Also with several turns at once."""


def kind_of(config: SessionConfig) -> type[LimitedClient]:
    """Who uses a session that is created so."""
    return LimitedClient if config.history == "linear" else LimitedTreeClient


def draw(seed: int) -> Callable[[SessionConfig], SessionConfig]:
    """What becomes of the configs of a schedule's sessions, the root's first: in some schedules they get limits."""
    rng = random.Random(f"budgets {seed}")
    often = iter((1.0, 0.3, 0.3) if rng.random() < SHARE else (0.0, 0.0, 0.0))

    def limited(config: SessionConfig) -> SessionConfig:
        return _limited(rng, config) if rng.random() < next(often) else config

    return limited


def _limited(rng: random.Random, config: SessionConfig) -> SessionConfig:
    limits = Limits(
        turns=rng.choice((None, 4, 9)),
        tokens=rng.choice((None, 17, 40, 40)),
        context=rng.choice((None, None, None, 60)),
        seconds=rng.choice((None, None, None, 20.0)),
        per=rng.choice(("rollout", "rollout", "session")),
    )
    params = rng.choice((None, {"max_tokens": 3}, {"max_tokens": 6}))
    return msgspec.structs.replace(config, limits=limits, on_limit=rng.choice(("error", "length")), params=params)


def ends(config: SessionConfig) -> bool:
    """Will turns alone use up what there is?"""
    limits = config.limits
    return limits is not None and not limits.turns is limits.tokens is None


def is_noted(store: Store, session_id: str) -> bool:
    """Does the log say that the session, unless it has ended, has reached a limit?"""
    log = store.log(session_id)
    return any(isinstance(recorded.event, LimitReached | SessionClosed | SessionErased) for recorded in log) or any(
        isinstance(recorded.event, TurnCommitted) and recorded.event.limit is not None for recorded in log
    )


class Uses(msgspec.Struct):
    """What a session has used by its log; `reserved` by its turns in flight. `ended`: the last event that ended one."""

    turns: int = 0
    tokens: int = 0
    reserved: dict[int, int] = {}
    ended: int = 0


def judge(store: Store, history: History) -> None:
    """What is wrong with the limits of all sessions, by their log in the order of its commits."""
    for problem in store.read(lambda connection: list(_Ledger(connection, store.commits).problems())):
        history.problem(problem)


class _Ledger:
    """Follows the log: who has reserved what, and what is used. `noted`: behind which turns the log says of a limit."""

    def __init__(self, connection: Connection, commits: Sequence[int]) -> None:
        self._connection = connection
        self._commits = commits
        self._roots = dict[str, str](_roots(connection))
        self._limits: dict[str, Limits] = {}
        self._budgets: dict[str, set[str]] = {}
        self._uses: dict[str, Uses] = {}
        self._noted: defaultdict[str, set[int]] = defaultdict(set)

    def problems(self) -> Iterator[str]:
        page = feed.page(self._connection, START, END, EventFilter(), limit=1_000_000)
        rows = [(placed.session_id, placed.row) for placed in page.rows if placed.session_id and placed.row]
        if self._commits:
            rows = _as_committed(self._connection, rows, self._commits)
        for session_id, row in rows:
            [recorded] = decode_events([row])
            for problem in self._follow(session_id, recorded.seq, recorded.event):
                yield f"{session_id} {recorded.seq}: {problem}"
        columns = sessions.c.session_id, sessions.c.spent_turns, sessions.c.spent_tokens
        for session_id, turns, tokens in self._connection.execute(select(*columns)):
            uses = self._uses[session_id]
            if (turns, tokens) != (uses.turns, uses.tokens):
                yield f"{session_id} has spent {turns} turns, {tokens} tokens; by its log {uses.turns}, {uses.tokens}"

    def _follow(self, session_id: str, seq: int, event: Event) -> Iterator[str]:
        uses = self._uses.setdefault(session_id, Uses())
        match event:
            case SessionCreated():
                self._budgets[session_id] = {session_id} if event.config.limits is not None else set()
                if event.config.limits is not None:
                    self._limits[session_id] = event.config.limits
                if event.budget is not None:
                    self._budgets[session_id].add(event.budget)
            case RolloutJoined(has_limits=True):
                self._budgets[session_id].add(event.root)
            case TurnOpened() if self._budgets[session_id]:
                if event.reserved is None:
                    yield "a turn was opened that counts against no limit"
                    return
                uses.reserved[seq] = event.reserved
                yield from self._within(session_id)
            case TurnCommitted():
                reserved = uses.reserved.pop(event.fence, None)
                if reserved is not None:
                    uses.turns, uses.tokens = uses.turns + 1, uses.tokens + event.output_tokens
                    if event.output_tokens > (reserved or event.output_tokens):
                        yield f"a turn has sampled {event.output_tokens} tokens, and reserved {reserved}"
            case TurnRejected() | TurnAbandoned():
                uses.reserved.pop(event.fence, None)
                uses.ended = seq
            case SessionClosed() | SessionErased():
                uses.reserved.clear()
            case LimitReached():
                uses.tokens += event.sampled
                was_running = uses.ended == seq - 1  # The limit ended a turn; only refusals are noted once.
                if not was_running and event.turn in self._noted[session_id]:
                    yield f"behind turn {event.turn} a limit was noted for the second time"
                self._noted[session_id].add(event.turn)
                if not event.sampled and event.limit in COUNTED and not self._is_spent(session_id, event.limit):
                    yield f"a turn was refused for its {event.limit}, of which some were left"

    def _of(self, budget: str) -> list[Uses]:
        """Whose uses count: the session's own, or those of its rollout."""
        if self._limits[budget].per == "session":
            return [self._uses[budget]]
        return [uses for name, uses in self._uses.items() if name == budget or self._roots.get(name) == budget]

    def _within(self, session_id: str) -> Iterator[str]:
        for budget in self._budgets[session_id]:
            limits, counted = self._limits[budget], self._of(budget)
            turns = sum(one.turns + len(one.reserved) for one in counted)
            tokens = sum(one.tokens + sum(one.reserved.values()) for one in counted)
            if limits.turns is not None and turns > limits.turns:
                yield f"turn {turns} of {limits.turns} was opened, as {budget} counts"
            if limits.tokens is not None and tokens > limits.tokens:
                yield f"{tokens} of {limits.tokens} tokens are used or reserved, as {budget} counts"

    def _is_spent(self, session_id: str, limit: LimitName) -> bool:
        most = {budget: getattr(self._limits[budget], limit) for budget in self._budgets[session_id]}
        used = {budget: sum(getattr(one, limit) for one in self._of(budget)) for budget in most}
        return any(used[budget] >= counted for budget, counted in most.items() if counted is not None)


def _as_committed(
    connection: Connection, rows: Sequence[tuple[str, EventRow]], commits: Sequence[int]
) -> list[tuple[str, EventRow]]:
    """Events of PostgreSQL in the order in which they were committed. Their log has that of transactions' beginnings:
    what a claim waited for at another session may stand behind it."""
    order = {tx: number for number, tx in enumerate(commits)}
    query = select(events.c.session_id, events.c.seq, literal_column("events.xmin::text::bigint"))
    written = {(row[0], row[1]): order.get(row[2], -1) for row in connection.execute(query)}
    newest: dict[str, int] = {}
    for session_id, row in reversed(rows):  # One whose text was erased was written anew, behind those that follow it.
        at = written[session_id, row.seq]
        written[session_id, row.seq] = newest[session_id] = min(at, newest.get(session_id, at))
    return sorted(rows, key=lambda one: written[one[0], one[1].seq])


def _roots(connection: Connection) -> Iterator[tuple[str, str]]:
    """The sessions that name a root, and that."""
    query = select(sessions.c.session_id, sessions.c.root_id).where(sessions.c.root_id.is_not(None))
    yield from ((row[0], row[1]) for row in connection.execute(query))
