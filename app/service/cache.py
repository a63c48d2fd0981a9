"""Sessions in memory: a bounded cache of folds and of the messages that requests repeat.

Nothing here is needed to be right. An entry is trusted for a turn only where its version equals the one
at which the claim was taken; it can be dropped at any moment and comes back from the log.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import msgspec

from app.domain.events import Recorded, UnknownEvent
from app.domain.session import Session, apply
from app.errors import AppError, SessionUnreadable
from app.store import reads
from app.store.engine import Database
from app.store.log_sessions import SaveSnapshot
from app.store.writer import Writer
from workers import codec
from workers.codec import CorruptContent

log = logging.getLogger("turnlog.cache")

ENTRY_BYTES = 2048
TURN_BYTES = 768
CHUNK_BYTES = 256
"""Rough memory of an entry, of each folded turn in it and of each chunk that its payloads name; enough to bound
the whole."""

SNAPSHOT_EVENTS = 1024
"""Events folded on a miss after which a snapshot is worth its write."""


class Transcript:
    """The raw JSON of a live chain's messages, joined by commas: what the next request's history is spliced from.

    It holds the turns of one chain from its beginning; a rollback cuts it, a commit adds to its end.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._turns: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._text)

    def upto(self, turn: int) -> bytes | None:
        """The messages up to and with turn `turn`'s reply; None if it is not here."""
        index = bisect.bisect_left(self._turns, turn)
        if index == len(self._turns) or self._turns[index] != turn:
            return None
        return bytes(memoryview(self._text)[: self._ends[index]])

    def extend(self, parent: int, turn: int, messages: bytes) -> None:
        """Add a turn's messages after those of `parent` (0: they begin a chain).

        Where `parent` is not here, nothing is kept: the chain is read from the store when it is needed.
        """
        kept = bisect.bisect_right(self._turns, parent)
        known = parent == 0 or (kept > 0 and self._turns[kept - 1] == parent)
        kept = kept if known else 0
        del self._turns[kept:], self._ends[kept:]
        del self._text[self._ends[-1] if self._ends else 0 :]
        if not known:
            return
        self._text += b"," + messages if self._text else messages
        self._turns.append(turn)
        self._ends.append(len(self._text))


class Live:
    """A session's state, and what of its messages is in memory."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.transcript = Transcript()
        self.keyed = {turn.retry_key: turn.number for turn in session.turns if turn.retry_key is not None}

    @property
    def size(self) -> int:
        chunks = sum(len(payload.chunks) for live in self.session.payloads.values() for payload in live)
        return ENTRY_BYTES + TURN_BYTES * len(self.session.turns) + CHUNK_BYTES * chunks + len(self.transcript)

    def advance(self, events: Iterable[Recorded]) -> bool:
        """Fold new events in; False where they do not follow, which means the entry is out of date."""
        for recorded in events:
            if recorded.seq != self.session.version + 1:
                return False
            self.session = apply(self.session, recorded, self.session.session_id)
            turns = self.session.turns
            if turns and turns[-1].seq == recorded.seq and turns[-1].retry_key is not None:
                self.keyed[turns[-1].retry_key] = turns[-1].number
        return True


class SessionCache:
    """Least recently used first out, bounded by a rough count of bytes."""

    def __init__(self, database: Database, writer: Writer, max_bytes: int) -> None:
        self.database = database
        self._writer = writer
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, Live] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        self._loading: dict[str, asyncio.Task[Live | None]] = {}
        self._saving: set[asyncio.Task[None]] = set()

    async def get(self, session_id: str) -> Live | None:
        """The session as this process knows it; from the log on a miss."""
        live = self._entries.get(session_id)
        if live is not None:
            self._entries.move_to_end(session_id)
            return live
        return await self._load(session_id)

    async def current(self, session_id: str) -> Live | None:
        """The session as it is: with one API process that is what the cache holds, with more it is read."""
        if self.database.is_sqlite:
            return await self.get(session_id)
        return await self.refresh(session_id)

    async def refresh(self, session_id: str) -> Live | None:
        """The session with what others have appended since. Raises SessionUnreadable."""
        live = self._entries.get(session_id)
        if live is None:
            return await self._load(session_id)
        known = live.session
        rows = await self.database.read(
            lambda connection: reads.event_rows(connection, session_id, after=known.version)
        )
        if live.session is known and not live.advance(_decoded(session_id, rows)):
            self.drop(session_id)
            return await self._load(session_id)
        self._account(session_id, live)
        return live

    def advance(self, session_id: str, events: Sequence[Recorded]) -> None:
        """Fold in what this process has just written."""
        live = self._entries.get(session_id)
        if live is None:
            # A load that is under way may have read the log before these events: let it read again.
            self._loading.pop(session_id, None)
            return
        if live.advance(events):
            self._account(session_id, live)
        else:
            self.drop(session_id)

    def remember(self, session_id: str, parent: int, turn: int, messages: bytes) -> None:
        """Keep a turn's messages, which the next request will need; `parent` 0: its history starts anew."""
        live = self._entries.get(session_id)
        if live is not None:
            live.transcript.extend(parent, turn, messages)
            self._account(session_id, live)

    def held_elsewhere(self, session: Session, incarnation: int) -> bool:
        """Does another process hold the session's open turn? With SQLite there is no other that lives."""
        held = session.open_turn
        return held is not None and held.incarnation != incarnation and not self.database.is_sqlite

    def drop(self, session_id: str) -> None:
        if self._entries.pop(session_id, None) is not None:
            self._bytes -= self._sizes.pop(session_id)

    async def messages(self, live: Live, turn: int) -> bytes:
        """The raw JSON of the history after turn `turn`, joined by commas. Raises SessionUnreadable."""
        found = live.transcript.upto(turn)
        if found is not None:
            return found
        session_id = live.session.session_id
        chain = [member.number for member in live.session.message_chain(turn)]
        frames = await self.database.read(
            lambda connection: reads.load_frames(connection, session_id, chain, facts=False)
        )
        try:
            wires = await _off_loop(len(chain), lambda: reads.unpack_wires(frames, chain))
        except CorruptContent as error:
            raise SessionUnreadable(f"session {session_id}: {error}") from error
        transcript = Transcript()
        for parent, number in zip([0, *chain], chain, strict=False):
            transcript.extend(parent, number, b",".join((*wires[number].messages, wires[number].message)))
        live.transcript = transcript
        self._account(session_id, live)
        return transcript.upto(turn) or b""

    async def close(self) -> None:
        for task in (*self._loading.values(), *self._saving):
            task.cancel()
        await asyncio.gather(*self._loading.values(), *self._saving, return_exceptions=True)

    async def _load(self, session_id: str) -> Live | None:
        """Concurrent misses of one session share one read, which outlives a cancelled request."""
        task = self._loading.get(session_id)
        if task is None:
            task = self._loading[session_id] = asyncio.create_task(self._read(session_id))
            task.add_done_callback(lambda done: self._loaded(session_id, done))
        return await asyncio.shield(task)

    def _loaded(self, session_id: str, task: asyncio.Task[Live | None]) -> None:
        if self._loading.get(session_id) is task:
            del self._loading[session_id]

    async def _read(self, session_id: str) -> Live | None:
        own = asyncio.current_task()
        while True:
            snapshot, rows = await self.database.read(lambda connection: reads.session_rows(connection, session_id))
            session = await _off_loop(len(rows), lambda: _folded(session_id, snapshot, rows))  # noqa: B023
            newest = self._loading.get(session_id)
            if newest is own:
                return None if session is None else self.put(session)
            if newest is not None:
                return await newest
            self._loading[session_id] = cast("asyncio.Task[Live | None]", own)

    def put(self, session: Session) -> Live:
        """Take a fold in, unless a newer one is there."""
        session_id = session.session_id
        live = self._entries.get(session_id)
        if live is None or live.session.version < session.version:
            live = Live(session)
            self.drop(session_id)
            self._entries[session_id] = live
            self._sizes[session_id] = 0
            self._account(session_id, live)
        return live

    def _account(self, session_id: str, live: Live) -> None:
        """Count an entry anew; one that was evicted meanwhile no longer counts."""
        if self._entries.get(session_id) is not live:
            return
        self._bytes += live.size - self._sizes[session_id]
        self._sizes[session_id] = live.size
        self._entries.move_to_end(session_id)
        while self._bytes > self._max_bytes and len(self._entries) > 1:
            self.drop(next(iter(self._entries)))

    def snapshot_if_due(self, before: int, session_id: str) -> None:
        """Save a fold now and then, so that a miss on a long session does not read all of it.

        `before` is the version before what was just appended.
        """
        live = self._entries.get(session_id)
        if live is None or before // SNAPSHOT_EVENTS == live.session.version // SNAPSHOT_EVENTS:
            return
        task = asyncio.create_task(self._save(live.session))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _save(self, session: Session) -> None:
        data = await asyncio.to_thread(lambda: codec.compress(msgspec.msgpack.encode(session)))
        operation = SaveSnapshot(session.session_id, session.version, reads.SNAPSHOT_FORMAT, data)
        try:
            await self._writer.submit(operation)
        except AppError as error:
            log.warning("no snapshot of session %s was saved: %s", session.session_id, error)


OFF_LOOP = 64
"""Rows whose decoding takes about a millisecond: more are decoded on a thread."""

T = TypeVar("T")


async def _off_loop(rows: int, work: Callable[[], T]) -> T:
    return work() if rows <= OFF_LOOP else await asyncio.to_thread(work)


def _decoded(session_id: str, rows: Sequence[reads.EventRow]) -> list[Recorded]:
    try:
        return reads.decode_events(rows)
    except UnknownEvent as error:
        raise SessionUnreadable(f"session {session_id}: {error}") from error


def _folded(session_id: str, snapshot: Session | None, rows: Sequence[reads.EventRow]) -> Session | None:
    try:
        return reads.fold_rows(session_id, snapshot, rows)
    except UnknownEvent as error:
        raise SessionUnreadable(f"session {session_id}: {error}") from error
