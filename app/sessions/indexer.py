"""Fills the search index: follows the log of all sessions beside the turns, one process at a time.

    log ──▶ page of events ──▶ content ──▶ texts, on a thread ──▶ entries, in a few transactions

Nothing waits for it. It works for a quarter of the time at most, so a backlog takes longer rather than the turns. The
last transaction moves the position. None writes anything if the position is no longer the one that the page was read
from. If the process ends before the last one, the page is read again, and what is in the index is left as it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from app.domain.events import (
    RolledBack,
    SessionCreated,
    SessionRestored,
    TurnCommitted,
    TurnRejected,
    UnknownEvent,
    shape_of,
)
from app.domain.fold import fold
from app.domain.search_text import bounded, name_of, pairs_of, read_message
from app.domain.session import Session
from app.domain.tree import superseded
from app.errors import AppError, InvalidRequest, SessionUnreadable
from app.sessions.index_reading import Content, Events, IndexReader
from app.sessions.log_end import POLL_S, LogEnd
from app.sessions.log_position import LogPosition, decode_position
from app.store import reads
from app.store.ports import Database, Writer
from app.store.reads import START, Position
from app.store.search import writing
from app.store.search.content import Key
from app.store.search.writing import (
    INDEX_VERSION,
    SET_ASIDE,
    SUPERSEDED,
    Begin,
    Change,
    Clear,
    Entry,
    IndexPage,
    Marks,
    Metadata,
    TakeIndexing,
    TurnEntries,
)
from app.tasks import cancelled
from workers import codec
from workers.codec import CorruptContent

log = logging.getLogger("turnlog.search")

PART_ENTRIES, PART_CHARS = 256, 128 << 10
"""A transaction that has so many entries, or so many characters, gets no more: some milliseconds of the writer's
time."""

IDLE_S = 0.5
"""Pause at the end of the log."""

REST = 3.0
"""After a page the task rests for so many times as long as the page took."""

RETRY_S = 5.0
"""Pause after a failure, and while another process fills the index."""

LEASE_S = 15.0

CLEARED_AT_ONCE = 2000

REMEMBERED = 20_000
"""Replies whose calls are remembered, for the names of their results."""

Calls = Mapping[str, str]


class IndexFigures(msgspec.Struct):
    """What this process has indexed since it began, and how far the index is behind the log if this process fills it:
    0 where it has all, or where another process fills it. `failures`: steps that are tried again."""

    turns: int = 0
    messages: int = 0
    failures: int = 0
    events_behind: int = 0
    seconds_behind: float = 0.0

    def wrote(self, changes: Sequence[Change]) -> None:
        turns = [change for change in changes if isinstance(change, TurnEntries)]
        self.turns += sum(turn.is_end for turn in turns)
        self.messages += sum(len(turn.entries) for turn in turns)

    def came_to(self, reached: LogPosition, upto: Position, now: float) -> None:
        """Positions are numbers of events, on PostgreSQL with gaps."""
        self.events_behind = max(0, upto.position - reached.place.position)
        written_at = now if reached.at is None or not self.events_behind else reached.at
        self.seconds_behind = max(0.0, now - written_at)


class Indexer:
    """Runs as one task from `start` to `stop`. `incarnation` gives this process's number in the store; `clock` is in
    seconds since the epoch."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        log_end: LogEnd,
        incarnation: Callable[[], int],
        *,
        figures: IndexFigures | None = None,
        clock: Callable[[], float] = time.time,
        rest: float = REST,
    ) -> None:
        self._figures = figures or IndexFigures()
        self._clock = clock
        self._database = database
        self._reader = IndexReader(database)
        self._writer = writer
        self._log_end = log_end
        self._incarnation = incarnation
        self._rest = rest
        self._calls: OrderedDict[Key, Calls] = OrderedDict()
        self._leased_until = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="turnlog-search")

    async def stop(self) -> None:
        await cancelled(self._task)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                pause = await self._step()
            except AppError as error:
                log.warning("the search index waits: %s", error)
                self._figures.failures += 1
                pause = RETRY_S
            except Exception:
                log.exception("an unexpected fault while the search index was filled")
                self._figures.failures += 1
                pause = RETRY_S
            await asyncio.sleep(max(pause, self._rest * (loop.time() - began)))

    async def _step(self) -> float:
        """Index a page; returns how long to wait at least."""
        if not await self._may():
            self._figures.events_behind, self._figures.seconds_behind = 0, 0.0
            return RETRY_S
        state = await self._database.read(writing.state)
        position = _known(state)
        if position is None:
            await self._begin_anew()
            return 0.0
        upto = (await self._log_end.now()).synced
        self._figures.came_to(position, upto, self._clock())
        if position.place >= upto:
            return IDLE_S
        page = await self._reader.events(position, upto)
        if page is None:
            log.warning("the search index is made anew: the log is not the one that it was made of")
            await self._begin_anew()
            return 0.0
        events, reached = page
        assert state.position is not None
        groups = await self._reader.groups(events)
        for number, group in enumerate(groups, 1):
            to = reached.encode() if number == len(groups) else state.position
            if not await self._write(group, state.position, to):
                return 0.0  # another process has moved it
        self._figures.came_to(reached, upto, self._clock())
        return 0.0

    async def _write(self, events: Events, position: str, to: str) -> bool:
        """Index these events and move the index from `position` to `to`; False if it is no longer there."""
        found = await self._reader.content(events)
        changes = await asyncio.to_thread(self._changes, found)
        changes += await self._restored(events)
        parts = parts_of(changes)
        for number, part in enumerate(parts, 1):
            moved = to if number == len(parts) else position
            if not await self._writer.submit(IndexPage(position, moved, part)):
                return False
            self._figures.wrote(part)
        return True

    async def catch_up(self) -> None:
        """Index all that is in the log now, without rest."""
        end = await self._log_end.present()
        ends = await self._log_end.now()
        while ends.synced < end:
            await asyncio.sleep(POLL_S)
            ends = await self._log_end.now()
        while await self._step() < IDLE_S:
            pass

    async def _may(self) -> bool:
        """Is it this process that fills the index?"""
        now = asyncio.get_running_loop().time()
        if self._database.is_sqlite or now < self._leased_until:
            return True
        taken = await self._writer.submit(TakeIndexing(str(self._incarnation()), LEASE_S))
        self._leased_until = now + LEASE_S / 3 if taken else 0.0
        return taken

    async def _begin_anew(self) -> None:
        more = True
        while more:
            more = await self._writer.submit(Clear(CLEARED_AT_ONCE))
        epoch = await self._database.read(reads.log_epoch)
        self._calls.clear()
        await self._writer.submit(Begin(LogPosition(epoch, START).encode()))

    def _changes(self, found: Content) -> list[Change]:
        """What the events change in the index; runs on a thread."""
        changes: list[Change] = []
        for session_id, recorded in found.events:
            match recorded.event:
                case TurnCommitted() as event if event.body_hash:
                    wire = found.wires.get((session_id, event.turn))
                    if wire is not None:
                        changes.append(self._turn(session_id, recorded.at, event, wire))
                case TurnRejected() as event:
                    said = bounded(" ".join(filter(None, (event.reason, event.detail))))
                    entry = Entry(None, "rejected", (), None, event.reason, said)
                    changes.append(TurnEntries(session_id, event.turn, recorded.at, [entry]))
                case RolledBack() as event:
                    changes.append(Marks(session_id, dict.fromkeys(event.discarded, SUPERSEDED)))
                case SessionCreated() if session_id in found.metadata:
                    changes.append(Metadata(session_id, pairs_of(found.metadata[session_id])))
        return changes

    def _turn(self, session_id: str, at: float, event: TurnCommitted, wire: bytes) -> TurnEntries:
        try:
            said = codec.unpack_messages(wire)
        except CorruptContent:
            return TurnEntries(session_id, event.turn, at, [])
        messages = [*said.messages, said.message]
        if shape_of(event.protocol) != "chat":
            roles = [b'{"role":"user","content":'] * len(said.messages) + [b'{"role":"assistant","content":']
            messages = [role + text + b"}" for role, text in zip(roles, messages, strict=True)]
        entries: list[Entry] = []
        calls: Calls = self._calls.get((session_id, event.parent), {})
        for place, raw in enumerate(messages):
            found, made = read_message(raw, calls)
            calls = {**calls, **made}
            is_reply = place == len(messages) - 1
            finish = name_of(event.finish_reason) if is_reply and event.finish_reason is not None else None
            number = event.base_messages + place
            entries.append(Entry(number, found.role, found.tools, finish, None, found.text))
            if is_reply:
                self._remember((session_id, event.turn), made)
        return TurnEntries(session_id, event.turn, at, entries)

    def _remember(self, turn: Key, calls: Calls) -> None:
        if calls:
            self._calls[turn] = calls
            if len(self._calls) > REMEMBERED:
                self._calls.popitem(last=False)

    async def _restored(self, events: Events) -> list[Change]:
        """The turns of the sessions that a checkpoint's restore took back: which of them are in no row now."""
        changes: list[Change] = []
        for session_id in {session_id for session_id, one in events if isinstance(one.event, SessionRestored)}:
            try:
                rows = await self._database.read(
                    lambda connection, session_id=session_id: reads.event_rows(connection, session_id),  # type: ignore[misc]
                    session_id=session_id,
                )
                session = await asyncio.to_thread(lambda rows=rows, of=session_id: fold(of, reads.decode_events(rows)))  # type: ignore[misc]
            except (UnknownEvent, SessionUnreadable):
                continue
            if session is not None:
                changes.append(Marks(session_id, _reasons(session)))
        return changes


def _reasons(session: Session) -> dict[int, str | None]:
    gone = set() if session.is_tree else superseded(session)
    live = {turn.number: SUPERSEDED if turn.number in gone else None for turn in session.turns}
    return {**live, **{turn.number: SET_ASIDE for turn in session.undone}}


def _known(state: writing.IndexState) -> LogPosition | None:
    """Where the index is; None if it must be made anew."""
    if state.position is None or state.version != INDEX_VERSION:
        return None
    try:
        return decode_position(state.position, "the search index")
    except InvalidRequest:
        return None


def parts_of(changes: Sequence[Change]) -> list[list[Change]]:
    """The changes in order, as many at once as one transaction writes; one empty part if there are none."""
    parts: list[list[Change]] = [[]]
    entries = size = 0
    for change in chain.from_iterable(map(_cut, changes)):
        if entries >= PART_ENTRIES or size >= PART_CHARS:
            parts.append([])
            entries = size = 0
        parts[-1].append(change)
        entries += len(change.entries) if isinstance(change, TurnEntries) else 1
        size += sum(len(entry.text) for entry in change.entries) if isinstance(change, TurnEntries) else 0
    return parts


def _cut(change: Change) -> Iterator[Change]:
    """The change itself, or a turn with many messages in pieces: a request of 4 MiB would hold the writer for 0.3 s."""
    if not isinstance(change, TurnEntries):
        yield change
        return
    begun = size = 0
    for end, entry in enumerate(change.entries, 1):
        size += len(entry.text)
        if end < len(change.entries) and (end - begun == PART_ENTRIES or size >= PART_CHARS):
            yield msgspec.structs.replace(change, entries=change.entries[begun:end], is_end=False)
            begun, size = end, 0
    yield msgspec.structs.replace(change, entries=change.entries[begun:])
