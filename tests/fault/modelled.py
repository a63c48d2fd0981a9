"""What the rules of `test_state_machine` act on: processes over a kind of store, and the model of a session."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from app.composition import store_points
from app.domain.events import SessionConfig
from app.errors import StoreUnavailable
from app.fleet.state import POLL_S
from app.protocols.registry import PROTOCOLS
from app.settings import Settings
from app.store import incarnations
from app.store.engine import Database
from app.store.ports import Database as Port
from app.turn.in_flight import InFlightTurn, Stages, TurnReply, Waiter, hash_key
from app.upstream.body import Body
from app.upstream.client import EngineClient, EngineReply, Grow
from app.upstream.headers import Headers
from app.upstream.streams import StreamReader
from tests.tools.audit import Audited, audit
from tests.tools.simulation import service
from tests.tools.simulation.engine import reply
from tests.tools.simulation.history import Acknowledged, History
from tests.tools.simulation.service import register
from tests.tools.simulation.store import MemoryDatabase, MemoryStore
from workers.pool import Pool

Message = dict[str, Any]


class Engine(EngineClient):
    """Answers at once, but for requests that a rule holds back until it lets them go."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._held: dict[str, asyncio.Event] = {}
        self.heard = asyncio.Event()

    def hold(self, text: str) -> asyncio.Event:
        """Requests that end in this message wait for the event."""
        self._held[text] = asyncio.Event()
        return self._held[text]

    async def post(
        self,
        url: str,
        body: bytes | Sequence[bytes | memoryview],
        headers: Headers,
        grow: Grow = lambda size: None,
        may_send: Callable[[], bool] | None = None,
        stream: StreamReader | None = None,
    ) -> EngineReply:
        if url.endswith("/abort_request"):
            return EngineReply(200, [], Body([b"{}"]))
        request = msgspec.json.decode(body if isinstance(body, bytes) else b"".join(body))
        text = request["messages"][-1]["content"]
        number = next(self._numbers)
        self.heard.set()
        # A generation is held once: whoever takes the turn over is answered.
        held = self._held.pop(text, None)
        if held is not None:
            await held.wait()
        return EngineReply(
            200, [("content-type", "application/json")], Body([msgspec.json.encode(reply(request, number))])
        )


class NoPool(Pool):
    """Every reply here is judged inline."""

    def __init__(self) -> None:
        pass

    async def stop(self, grace_s: float) -> None:
        return

    async def run(self, job: bytes, *pieces: bytes | bytearray | memoryview) -> bytes:
        raise AssertionError("a small reply was handed over")


class Mortal:
    """A process's way to its database, which ends with the process."""

    def __init__(self, database: Port) -> None:
        self._database = database
        self.is_sqlite = database.is_sqlite
        self.lanes = database.lanes
        self.unreadable = database.unreadable
        self.bucket = database.bucket
        self.dead = False

    async def read(self, function: Callable[..., Any], **options: Any) -> Any:
        self._require_life()
        return await self._database.read(function, **options)

    async def read_autocommit(self, statement: Any, parameters: Any) -> Any:
        self._require_life()
        return await self._database.read_autocommit(statement, parameters)

    async def write(self, function: Callable[..., Any], *, durable: bool, **rest: Any) -> Any:
        self._require_life()
        return await self._database.write(function, durable=durable, **rest)

    async def empty_log_file(self) -> None:
        await self._database.empty_log_file()

    async def give_back(self) -> None:
        await self._database.give_back()

    def _require_life(self) -> None:
        if self.dead:
            raise StoreUnavailable("this process is no more")


class Node:
    """One process: its service, and its connection to the store."""

    def __init__(self, place: Place, name: str, engine: Engine) -> None:
        self._place = place
        self._name = name
        self._engine = engine

    async def start(self) -> None:
        self._database = await self._place.open()
        self.mortal = Mortal(self._database)
        self.incarnation = await self.mortal.write(
            lambda tx: register(tx, self._name, alone=self.mortal.is_sqlite), durable=True
        )
        self.service = service.made(
            SETTINGS, self.mortal, self._engine, NoPool(), time.time, self.incarnation, self._lease_left, POLL_S
        )
        await service.start(self.service)

    async def _lease_left(self, incarnation: int) -> float | None:
        """As `Recovery.lease_left`: None where its claims are void, and for a while longer where it lives."""
        if incarnation not in self._place.gone:
            return SETTINGS.lease_s
        await self.mortal.write(lambda tx: incarnations.end(tx, incarnation), durable=False)
        return None

    async def has_died(self, incarnation: int) -> bool:
        """Does the store say that a process, which lived at most a minute, died without an orderly stop?"""
        died = await self.mortal.read(lambda tx: incarnations.died_after(tx, incarnation, SETTINGS.lease_s))
        return died is not None and incarnation != self.incarnation

    async def stop(self) -> None:
        await self.service.stop()
        self._place.release(self._database)

    async def crash(self) -> None:
        self.mortal.dead = True
        self._place.gone.add(self.incarnation)
        with contextlib.suppress(StoreUnavailable):
            await self.service.stop()
        self._place.release(self._database)

    def take(self, session: Model, messages: Sequence[Message], key: str | None) -> asyncio.Task[TurnReply]:
        body = msgspec.json.encode({"model": "m", "messages": messages})
        retry_key = None if key is None else hash_key(key)
        turn = InFlightTurn(session.id, Waiter(lambda size: None), Stages(time.monotonic), retry_key=retry_key)
        return asyncio.ensure_future(self.service.turns.take(turn, PROTOCOLS["chat"], body))


SETTINGS = Settings.model_construct(upstreams=("http://engine",), lease_s=3600.0, client_reply="verbatim")


class Place:
    """A kind of store, and how many processes it serves. `gone` are the incarnations that crashed."""

    def __init__(self, url: str | None) -> None:
        self.gone: set[int] = set()
        self.history = History(time.monotonic)
        self.is_memory = url is None
        self.runner = asyncio.Runner()
        self._free: list[Port] = []
        self._url = url
        self._memory = MemoryStore() if url is None else None
        self.most = 1 if url is not None and url.startswith("sqlite") else 2

    def begin(self) -> None:
        """What is in memory begins anew; the others keep the sessions of earlier examples."""
        if self._memory is not None:
            self._memory.restart(time.time)
            self.gone.clear()
            self.history = History(time.monotonic)

    async def open(self) -> Port:
        """A database that no process has; the connections of one that is gone are as good as new ones."""
        if self._free:
            return self._free.pop()
        if self._url is None:
            assert self._memory is not None
            return MemoryDatabase(self._memory)
        database = Database(self._url, points=store_points())
        await database.open()
        return database

    def told(self, session_id: str, answer: TurnReply, turn: Turn, asked_at: float) -> None:
        """A client has the reply of a turn."""
        assert answer.turn is not None
        body, now = b"".join(answer.parts), self.history.now()
        told = Acknowledged(session_id, answer.turn, body, turn.name, turn.key, answer.replayed, asked_at, now)
        self.history.turn(told)

    def release(self, database: Port) -> None:
        self._free.append(database)

    async def audit(self) -> Audited:
        database: Any = await self.open()
        try:
            return await audit(database, [turn.told() for turn in self.history.turns])
        finally:
            self.release(database)

    def end(self) -> None:
        async def close() -> None:
            for database in self._free:
                if isinstance(database, Database):
                    await database.close()

        self.runner.run(close())
        self.runner.close()
        if self._memory is not None:
            self._memory.close()


@dataclass
class Turn:
    """A committed turn of the model. `incarnation` is the process's that committed it."""

    number: int
    messages: list[Message]
    key: str | None
    incarnation: int

    @property
    def name(self) -> str:
        return self.key or f"#{self.number}"


@dataclass
class Flight:
    """A turn in flight: its waiting requests, the first of them at `node`, and where each waits.

    `lost`: it can no longer commit. `asked_at` is the history's time, `number` the turn's.
    """

    number: int
    asked_at: float
    node: Node
    messages: list[Message]
    key: str
    go: asyncio.Event
    tasks: dict[asyncio.Task[TurnReply], Node]
    lost: bool = False


@dataclass
class Model:
    """What a client may expect of a session: its live turns, how many were ever opened and committed, and its end."""

    id: str
    config: SessionConfig
    live: list[Turn] = field(default_factory=list)
    opened: int = 0
    committed: int = 0
    status: str = "open"
    flight: Flight | None = None

    def open(self) -> int:
        """The number of the next turn that is opened; no other turn ever gets it."""
        self.opened += 1
        return self.opened

    @property
    def messages(self) -> list[Message]:
        return list(self.live[-1].messages) if self.live else []
