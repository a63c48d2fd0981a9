"""A client of the server: takes a session's turns, each answered by one mutated reply, and audits what is stored."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from app.turn.client_reply import ASKED_FOR
from tests.tools.mutated_replies import checks, wishes
from tests.tools.mutated_replies.checks import Taken
from tests.tools.mutated_replies.engine import Engine, Order, Served
from tests.tools.mutated_replies.mutate import CONTROL
from tests.tools.mutated_replies.payload_reader import KINDS, Malformed
from tests.tools.mutated_replies.reader import Demand, Reading, read, spell
from tests.tools.mutated_replies.tally import Failure, Tally
from tests.tools.session_client import Answer, SessionClient

GOOD_SHARE = 0.3
"""Sessions that end with a sound reply, which must be committed whatever went before."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One server of the run. `asked`: the payloads of TURNLOG_REPLAY; `judged`: does the server know payloads?"""

    name: str
    verbatim: bool
    judged: bool
    asked: Collection[str]


@dataclass(slots=True)
class _Session:
    """A session as its client knows it; `told` is how each turn ended, in the log's words."""

    index: int
    name: str
    client: SessionClient
    habit: wishes.Habit
    rng: random.Random
    history: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    served: dict[int | None, Served] = field(default_factory=dict)
    taken: list[Taken] = field(default_factory=list)


class Client:
    """Sessions one after the other at a server."""

    def __init__(
        self,
        phase: Phase,
        engine: Engine,
        http: aiohttp.ClientSession,
        base_url: str,
        seed: int,
        tally: Tally,
        folder: Path,
    ) -> None:
        self._phase = phase
        self._engine = engine
        self._http = http
        self._base_url = base_url
        self._seed = seed
        self._tally = tally
        self._folder = folder

    async def session(self, index: int, numbers: range) -> int:
        """One session that is served the replies `numbers`; the rows that it has in the export."""
        rng = random.Random(f"session {self._seed}/{index}")
        name = f"mutated-{self._seed}-{index}"
        client = SessionClient(self._http, name, self._server, by_header=True)
        session = _Session(index, name, client, wishes.habit(rng), rng)
        try:
            for number in numbers:
                await self._turn(session, number)
            if rng.random() < GOOD_SHARE:
                after_refusal = bool(session.told) and session.told[-1] != "committed"
                await self._turn(session, None)
                self._tally.good_after += after_refusal
            return await self._audit(session)
        except (TimeoutError, aiohttp.ClientError, ValueError, Malformed) as error:
            self._fail(session, None, "", f"{type(error).__name__}: {error}")
            return 0

    async def _turn(self, session: _Session, number: int | None) -> None:
        question = f"Question {session.index}.{len(session.taken)}: {session.rng.choice(wishes.TEXTS)}"
        messages = [*session.history, json.dumps({"role": "user", "content": question})]
        body = json.dumps(wishes.request(session.rng, session.habit))[:-1] + ',"messages":[' + ",".join(messages) + "]}"
        self._engine.orders[session.name] = Order(self._seed, number, session.habit.dialect)
        self._engine.served.pop(session.name, None)
        answer = await session.client.ask(body.encode())
        served = self._engine.served.get(session.name)
        if served is None:
            self._fail(session, None, "", f"{answer.status} before the engine was asked: {answer.body[:300]!r}")
            session.told += _not_opened(answer.status)
            return
        session.served[number] = served
        reading = self._read(served.body, served.start)
        if answer.status == 200:
            for what in self._accepted(session, number, served.body, answer, reading):
                self._fail(session, number, served.kind, what)
            if number is not None:
                self._tally.counts[served.kind].accepted += 1
            if isinstance(reading, Reading):
                session.history = [*messages, spell(reading.message)]
        else:
            self._refused(session, number, served.kind, answer, reading)

    def _read(self, body: bytes, start: int) -> Reading | Malformed:
        try:
            return read(body, Demand(self._phase.judged, self._phase.asked, start))
        except Malformed as error:
            return error

    def _accepted(
        self, session: _Session, number: int | None, sent: bytes, answer: Answer, reading: Reading | Malformed
    ) -> Iterator[str]:
        """A 200: what is wrong with it."""
        session.told.append("committed")
        if isinstance(reading, Malformed):
            yield f"200, but {reading}"
            return
        session.taken.append(Taken(number, answer.turn, sent, reading))
        unasked = {*KINDS} - session.habit.asks
        if not session.habit.asks_for_all:
            unasked |= ASKED_FOR
        yield from checks.client_reply(sent, answer.body, () if self._phase.verbatim else sorted(unasked))

    def _refused(
        self,
        session: _Session,
        number: int | None,
        kind: str,
        answer: Answer,
        reading: Reading | Malformed,
    ) -> None:
        """Not a 200: it must be a 502 for a reason, and no sound reply's."""
        code, message = answer.code, answer.message
        session.told.append(code)
        if number is not None:
            count = self._tally.counts[kind]
            count.refused += code != "worker_crash"
            if code == "worker_crash":
                count.crashed += 1
                self._fail(session, number, kind, "a worker crashed")
        if answer.status != 502 or code not in ("upstream_invalid", "worker_crash"):
            self._fail(session, number, kind, f"{answer.status} {code}: {message}")
        elif kind == CONTROL and not _other_width(session, reading):
            self._fail(session, number, kind, f"a sound reply was refused: {message}")

    async def _audit(self, session: _Session) -> int:
        """Compare what is stored with what was served; the session's rows in the export."""
        path = f"/sessions/{session.name}"
        replay = "&replay=true" if self._phase.judged else ""
        log, state = await session.client.get(f"{path}/events"), await session.client.get(path)
        # A 500 ends its connection, which must not be the next session's.
        rows = await session.client.get(f"/export?session_id={session.name}{replay}", alone=True)
        found = [*checks.events(session.told, log)]
        if session.told.count("committed") == len(session.taken):
            found += checks.records(session.taken, state)
            found += checks.export(session.taken, rows, self._phase.judged)
        for what in found:
            place = next((one for one in session.taken if f"turn {one.turn}:" in what), None)
            number = place.number if place else None
            self._fail(session, number, "" if number is None else session.served[number].kind, what)
        return rows.count(b"\n")

    async def _server(self) -> str:
        return self._base_url

    def _fail(self, session: _Session, number: int | None, kind: str, what: str) -> None:
        """Note it, with the bytes of the reply, or of all that the session was given."""
        name = f"{self._phase.name}-{self._seed}-{session.index}"
        wanted = [number] if number in session.served else list(session.served)
        for one in wanted:
            (self._folder / f"{name}-{'sound' if one is None else one}.reply").write_bytes(session.served[one].body)
        again = f"--seed {self._seed} --only {session.index}"
        place = self._folder / f"{name}-{'*' if number is None else number}.reply"
        self._tally.failures.append(
            Failure(self._phase.name, session.index, number, kind, what, f"{again}; bytes: {place}")
        )


def _other_width(session: _Session, reading: Reading | Malformed) -> bool:
    """Has a mutant been committed whose payload has rows of another width than this sound reply's?"""
    if isinstance(reading, Malformed) or not session.taken:
        return False
    before = session.taken[-1].reading.payloads
    return any(kind in before and before[kind].width != rows.width for kind, rows in reading.payloads.items())


def _not_opened(status: int) -> list[str]:
    """A request that was refused before a turn was opened leaves nothing in the log."""
    return [] if status < 500 else ["?"]


async def run_sessions(client: Client, sessions: list[tuple[int, range]], clients: int) -> int:
    """All sessions, `clients` at a time; how many rows the export should have."""
    waiting = iter(sessions)
    rows = 0

    async def work() -> None:
        nonlocal rows
        for index, numbers in waiting:
            found = await client.session(index, numbers)
            rows += found

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(work())
    return rows
