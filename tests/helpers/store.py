"""Shorthands over the writer: one method an operation, with defaults for what a test does not care about."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
from sqlalchemy import bindparam, delete, insert, select, update

from app.domain.events import EXPORTED, Event, Recorded, RewardAssigned, TurnCommitted, TurnRejected
from app.domain.fleet import EngineListed
from app.domain.session import Session, encode_session, fold
from app.fleet.engines import Engines
from app.store import feed, incarnations
from app.store.database import Database
from app.store.dialect import Tx, now, up_since
from app.store.feed import EventFilter, Position, changed_sessions
from app.store.log import Appended, BaseOperation, StoredBlob, StoredChunk, size_of
from app.store.log_sessions import AssignReward, Close, Create, Erase, SaveSnapshot
from app.store.log_turns import Claim, Commit, Known, Release, Stage
from app.store.schema import chunks as chunks_table
from app.store.schema import events, open_turns, sessions
from app.store.schema import incarnations as incarnations_table
from app.store.sessions import (
    SNAPSHOT_FORMAT,
    ContentColumns,
    HeadRow,
    fold_rows,
    load_events,
    load_head,
    load_session,
    session_rows,
)
from app.store.writer import Writer
from app.upstream.client import EngineClient
from helpers.databases import database_at
from helpers.log import BODY, committed, created, float64, int32, opened
from workers import codec
from workers.codec import Exchange, StoredTokens

LEASE_S = 8.0
CLAIMED_AT = 2.0

event_at = select(events.c.at).where(events.c.session_id == bindparam("sid"), events.c.seq == bindparam("place"))
START = Position(0, 0)
FAR = Position(1 << 62, 1 << 62)


def create(session_id: str, *, body_hash: str = BODY, blob: StoredBlob | None = None, at: float = 1.0) -> Create:
    return Create(session_id, at, msgspec.structs.replace(created(), body_hash=body_hash), blob)


def claim(
    session_id: str,
    expected: int,
    incarnation: int,
    *,
    turn: int = 1,
    parent: int = 0,
    last_event_at: float = 1.0,
    turns: int | None = None,
    **kw: Any,
) -> Claim:
    """`last_event_at` is by default when sessions are created here, and the turns before it are `turns`."""
    known = Known(expected, last_event_at, turn - 1 if turns is None else turns)
    return Claim(session_id, known, CLAIMED_AT, opened(turn, parent, incarnation, **kw), LEASE_S)


def commit(
    session_id: str,
    fence: int,
    incarnation: int,
    *,
    turn: int = 1,
    parent: int = 0,
    before: Sequence[Event] = (),
    text: bytes = b"{}",
    after: Sequence[Event] = (),
    blobs: Sequence[StoredBlob] = (),
    chunks: Sequence[StoredChunk] = (),
    at: float = 3.0,
    known: Known | None = None,
    opened_at: float = CLAIMED_AT,
    **fields: Any,
) -> Commit:
    """By default its claim is the last event, and all turns before it are committed."""
    tokens = codec.pack(StoredTokens(int32([1]), int32([2, 3]), float64([-0.5, -1.5])))
    exchange = codec.pack(Exchange(messages=[text], message=text, reply=text, headers=[]))
    event: TurnCommitted = committed(turn, parent, fence, **fields)
    known = known or Known(fence, opened_at, turn - 1)
    every = [*before, event, *after]
    size = len(tokens) + len(exchange) + size_of([*blobs, *chunks])
    return Commit(
        session_id, fence, incarnation, opened_at, at, known, every, tokens, exchange, blobs, chunks, size=size
    )


def release(session_id: str, fence: int, incarnation: int, *, turn: int = 1) -> Release:
    return Release(session_id, fence, incarnation, CLAIMED_AT, 3.0, TurnRejected(turn, fence, "upstream_error", 500))


def stage(session_id: str, fence: int, incarnation: int, *chunks: StoredChunk) -> Stage:
    return Stage(session_id, fence, incarnation, CLAIMED_AT, chunks)


def reward(session_id: str, value: float, turn: int | None = None) -> AssignReward:
    return AssignReward(session_id, 4.0, RewardAssigned(value, {}, turn))


class Store:
    """One process's view of a store: its database, its writer, its incarnation `me`."""

    def __init__(self, database: Database, writer: Writer, me: int) -> None:
        self.database = database
        self.writer = writer
        self.me = me

    @classmethod
    @asynccontextmanager
    async def over(cls, database: Database) -> AsyncIterator[Store]:
        me = await add_incarnation(database)
        writer = Writer(database)
        writer.start()
        yield cls(database, writer, me)
        await writer.stop()

    async def submit(self, operation: Any) -> Any:
        return await self.writer.submit(operation)

    async def together(self, *operations: Any) -> list[Any]:
        """The operations in one transaction, in this order."""

        def run(tx: Tx) -> list[Any]:
            return [operation.apply(tx) for operation in operations]

        return await self.database.write(run, durable=True)

    async def create(self, session_id: str, **kw: Any) -> Any:
        return await self.submit(create(session_id, **kw))

    async def claim(self, session_id: str, expected: int, **kw: Any) -> Any:
        """By a process that knows the event at `expected`, if there is one."""
        known = await self.known(session_id, expected)
        fields = {"last_event_at": known.last_event_at, "turns": known.turns, **kw}
        return await self.submit(claim(session_id, expected, fields.pop("incarnation", self.me), **fields))

    async def known(self, session_id: str, version: int | None = None) -> Known:
        """What is known of a session that is at this version, by default of its newest."""
        query = select(sessions.c.version, sessions.c.turns).where(sessions.c.session_id == session_id)
        head = await self.database.read(lambda connection: connection.execute(query).first()) or (0, 0)
        seq = head[0] if version is None else version
        last = select(events.c.at).where(events.c.session_id == session_id, events.c.seq == seq)
        return Known(seq, await self.database.read(lambda c: c.execute(last).scalar() or 0.0), head[1])

    async def commit(self, session_id: str, fence: int, **kw: Any) -> Any:
        """Decided for the newest state."""
        fields = {"known": await self.known(session_id), **kw}
        return await self.submit(commit(session_id, fence, fields.pop("incarnation", self.me), **fields))

    async def release(self, session_id: str, fence: int, **kw: Any) -> Any:
        return await self.submit(release(session_id, fence, kw.pop("incarnation", self.me), **kw))

    async def close(self, session_id: str) -> Any:
        return await self.submit(Close(session_id, 5.0))

    async def erase(self, session_id: str) -> Any:
        return await self.submit(Erase(session_id, 6.0))

    async def take_turn(self, session_id: str, parent: int | None = None, **kw: Any) -> Appended:
        """Claim and commit the session's next turn, by default behind the newest."""
        session = await self.session(session_id)
        assert session is not None
        if parent is None:
            parent = session.path[-1] if session.path else 0
        turn = session.last_turn + 1
        taken = await self.claim(session_id, session.version, turn=turn, parent=parent)
        assert isinstance(taken, Appended), taken
        done = await self.commit(session_id, taken.events[0].seq, turn=turn, parent=parent, **kw)
        assert isinstance(done, Appended), done
        return done

    async def log(self, session_id: str) -> list[Recorded]:
        return await self.database.read(lambda connection: load_events(connection, session_id))

    async def session(self, session_id: str) -> Session | None:
        """The fold of the whole log, whatever a snapshot says."""
        return fold(session_id, await self.log(session_id))

    async def loaded(self, session_id: str) -> Session | None:
        """What the service would load: snapshot and the rest of the log. Both ways to read them must give the same."""
        rows = await self.database.read(lambda connection: session_rows(connection, session_id))
        found = await load_session(self.database, session_id, ContentColumns.NONE)
        session = fold_rows(session_id, *rows)
        assert fold_rows(session_id, found.snapshot, found.rows) == session
        return session

    async def head(self, session_id: str) -> HeadRow | None:
        return await self.database.read(lambda connection: load_head(connection, session_id))

    async def open_turns(self, session_id: str) -> list[Any]:
        query = select(open_turns).where(open_turns.c.session_id == session_id)
        return await self.database.read(lambda connection: list(connection.execute(query)))

    async def chunks(self, session_id: str) -> dict[tuple[int, int], tuple[bytes | None, int | None]]:
        """The stored chunks by fence and number: their bytes, and the event that made a tombstone of them."""
        columns = (chunks_table.c.fence, chunks_table.c.number, chunks_table.c.data, chunks_table.c.tombstoned_by)
        query = select(*columns).where(chunks_table.c.session_id == session_id)
        rows = await self.database.read(lambda connection: list(connection.execute(query)))
        return {(row[0], row[1]): (row[2], row[3]) for row in rows}

    async def horizon(self) -> Position:
        return await self.database.read(feed.horizon)

    async def changed(
        self, after: Position = START, upto: Position = FAR, limit: int = 1000
    ) -> list[tuple[str, Position]]:
        return await self.database.read(
            lambda connection: changed_sessions(connection, EventFilter(EXPORTED), after=after, upto=upto, limit=limit)
        )

    async def save_snapshot(self, session: Session, data: bytes | None = None, format: str | None = None) -> None:
        frame = codec.compress(encode_session(session)) if data is None else data
        await self.submit(SaveSnapshot(session.session_id, session.version, format or SNAPSHOT_FORMAT, frame))

    async def head_equals_fold(self, session_id: str) -> None:
        """The rows that are not events must say what the events say."""
        head, session = await self.head(session_id), await self.session(session_id)
        assert head is not None
        assert session is not None
        claims = await self.open_turns(session_id)
        assert head.version == session.version
        assert head.status == session.status
        assert head.turns == len(session.turns)
        assert head.reward == (session.reward.reward if session.reward else None)
        held = [] if session.open_turn is None else [(session.open_turn.turn, session.open_turn.fence)]
        assert [(row.turn, row.fence) for row in claims] == held
        counted = select(sessions.c.open_turns).where(sessions.c.session_id == session_id)
        assert await self.database.read(lambda c: c.execute(counted).scalar_one()) == len(claims)

    async def forget_event(self, session_id: str, seq: int) -> None:
        """Damage: the event is gone."""
        gone = delete(events).where(events.c.session_id == session_id, events.c.seq == seq)
        await self.database.write(lambda tx: tx.run(gone, {}), durable=True)


class Meanwhile:
    """The writer of a process: before its first operation of a kind, another process writes some."""

    def __init__(self, writer: Writer, kind: type[BaseOperation], *others: Any) -> None:
        self._writer = writer
        self._kind = kind
        self._others = list(others)

    async def submit(self, operation: Any) -> Any:
        while isinstance(operation, self._kind) and self._others:
            await self._writer.submit(self._others.pop(0))
        return await self._writer.submit(operation)

    @property
    def as_writer(self) -> Writer:
        assert self._others, "it is used once"
        return cast(Writer, self)


@asynccontextmanager
async def two_stores(url: str) -> AsyncIterator[tuple[Store, Store]]:
    """Two processes' stores on one database."""
    async with (
        database_at(url) as one,
        database_at(url) as other,
        Store.over(one) as first,
        Store.over(other) as second,
    ):
        yield first, second


async def add_incarnation(database: Database, host: str = "elsewhere") -> int:
    """A live process on another host, so that no registration here ends it."""
    made = (
        insert(incarnations_table)
        .values(host=host, pid=1, started_at=now(), heartbeat_at=now(), release="0.1.0")
        .returning(incarnations_table.c.id)
    )
    row = await database.write(lambda tx: tx.one(made, {}), durable=False)
    assert row is not None
    return int(row[0])


async def end_incarnation(database: Database, number: int) -> None:
    await database.write(lambda tx: incarnations.end(tx, number), durable=False)


async def silence_incarnation(database: Database, number: int, seconds: float) -> None:
    """As if its last heartbeat were so long ago. Silence counts from the start of the database server, at most."""
    late = update(incarnations_table).where(incarnations_table.c.id == number).values(heartbeat_at=now() - seconds)
    await database.write(lambda tx: tx.run(late, {}), durable=False)
    has_run = select(now() - up_since() >= seconds)
    while not await database.read(lambda connection: connection.execute(has_run).scalar()):
        await asyncio.sleep(0.1)


def engines_at(*versions: str | None) -> Engines:
    """Engines that are known to have these weight versions."""
    engines = Engines(cast(EngineClient, None))
    engines.serve([EngineListed(f"http://engine-{number}") for number in range(len(versions))])
    for member, version in zip(engines.members.values(), versions, strict=True):
        member.weight_version = version
    return engines
