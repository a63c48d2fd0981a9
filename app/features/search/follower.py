"""Fills the index: follows the log of all sessions beside the turns, one process at a time.

    events ──▶ content ──▶ texts, on a thread ──▶ messages and the position, in one transaction of the index

Nothing waits for it. It works for a quarter of the time at most, so that a backlog takes longer rather than the turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping

import msgspec

from app.domain.events import UnknownEvent
from app.errors import AppError, InvalidRequest, PositionGone, SessionUnreadable
from app.features.search.index import Index, Message, Page
from app.features.search.text import name_of, read_message
from app.metrics import Metrics
from app.process import cancelled
from app.sessions.all_events import AllEvents, EventQuery
from app.sessions.conversation import as_messages
from app.sessions.log_end import LogEnd, LogPosition, decode_position
from app.store.content import load_frames
from app.store.feed import START
from app.store.ports import Database, of_session
from app.store.sessions import fold_rows, session_rows
from workers import codec
from workers.codec import CorruptContent

log = logging.getLogger("turnlog.search")

PAGE_CHARS = 1 << 20
"""A page with so many characters gets no more messages."""

IDLE_S = 0.5
"""Pause at the end of the log."""

REST = 3.0
"""After a page the task rests for so many times as long as the page took."""

RETRY_S = 5.0
"""Pause after a failure, and while another process fills the index."""

REMEMBERED = 20_000
"""Replies whose calls are remembered, for the names of their results."""

Calls = Mapping[str, str]
"""Names by ids."""


class _Line(msgspec.Struct):
    """A line of the log, as far as it matters here. One that cannot be read has only a position."""

    position: str
    session_id: str = ""
    type: str | None = None
    at: float | None = None
    turn: int = 0
    parent: int = 0
    base_messages: int = 0
    body_hash: str = ""
    finish_reason: str | None = None
    protocol: str = "chat"


class Follower:
    """Runs as one task from `start` to `stop`."""

    def __init__(self, database: Database, log_end: LogEnd, events: AllEvents, index: Index, metrics: Metrics) -> None:
        self._database = database
        self._log_end = log_end
        self._events = events
        self._index = index
        self._metrics = metrics
        self._calls: OrderedDict[tuple[str, int], Calls] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="turnlog-search")

    async def stop(self) -> None:
        await cancelled(self._task)
        await self._index.close()

    async def _run(self) -> None:
        is_outdated = False
        while True:
            try:
                if is_outdated:
                    await self._index.clear()
                    is_outdated = False
                await self._index.open()
                while (fence := await self._index.take_lease()) is not None:
                    await self._step(fence)
                    await asyncio.sleep(IDLE_S)
                self._metrics.set("turnlog_search_behind_events", 0)
            except (PositionGone, InvalidRequest) as error:
                log.warning("rebuilding the search index: %s", error)
                is_outdated = True
                continue
            except AppError as error:
                log.warning("the search index is not being updated: %s; retrying", error)
                self._metrics.add("turnlog_search_failures_total")
            except Exception:
                log.exception("unexpected error while filling the search index")
                self._metrics.add("turnlog_search_failures_total")
            await asyncio.sleep(RETRY_S)

    async def _step(self, fence: int) -> None:
        """Write what is behind the index's position. Raises PositionGone, InvalidRequest, StoreUnavailable."""
        position = await self._index.position()
        known = LogPosition("", START) if position is None else decode_position(position, "the search index")
        end = (await self._log_end.now()).synced
        self._metrics.set("turnlog_search_behind_events", max(0, end.position - known.place.position))
        if position is not None and known.place >= end:
            return
        async with contextlib.aclosing(await self._events.start(EventQuery(after=position))) as chunks:
            async for chunk in chunks:
                began = time.monotonic()
                async for page in self._pages(chunk):
                    await self._index.write(page, fence)
                await asyncio.sleep(REST * (time.monotonic() - began))
                if await self._index.take_lease() != fence:
                    return

    async def _pages(self, chunk: bytes) -> AsyncIterator[Page]:
        """What some lines of the log change."""
        lines = [msgspec.json.decode(line, type=_Line) for line in chunk.splitlines()]
        page, size = Page(), 0
        for line in lines:
            if line.type == "TurnCommitted" and line.body_hash:  # the copy of a fork has none
                messages = await self._messages(line)
                page.messages += messages
                size += sum(len(message.text) for message in messages)
            elif line.type == "SessionRestored":
                with contextlib.suppress(UnknownEvent, SessionUnreadable):
                    page.live[line.session_id] = await self._live_turns(line.session_id)
            elif line.type == "SessionErased":
                page.erased.add(line.session_id)
            if size > PAGE_CHARS or line is lines[-1]:
                page.position = line.position
                yield page
                page, size = Page(), 0

    async def _live_turns(self, session_id: str) -> set[int]:
        snapshot, rows = await of_session(self._database, session_id, session_rows)
        session = await asyncio.to_thread(fold_rows, session_id, snapshot, rows)
        return set() if session is None else {turn.number for turn in session.turns}

    async def _messages(self, line: _Line) -> list[Message]:
        """The messages that the turn brought; none if its content is damaged or gone."""
        try:
            frames = await of_session(self._database, line.session_id, load_frames, [line.turn], tokens=False)
            if line.turn not in frames:
                return []
            called = self._calls.get((line.session_id, line.parent), {})
            messages, made = await asyncio.to_thread(_read, line, frames[line.turn][1], called)
        except (SessionUnreadable, CorruptContent):
            return []
        if made:
            self._calls[line.session_id, line.turn] = made
            if len(self._calls) > REMEMBERED:
                self._calls.popitem(last=False)
        return messages


def _read(line: _Line, frame: bytes | None, called: Calls) -> tuple[list[Message], Calls]:
    """The turn's messages, and the calls of its reply. Raises CorruptContent."""
    said = codec.unpack_messages(frame)
    messages: list[Message] = []
    made: Calls = {}
    for place, one in enumerate(as_messages(line.protocol, said), line.base_messages):
        read, made = read_message(one, called)
        called = {**called, **made}
        tools = "".join(f"\n{tool}" for tool in read.tools) + "\n" if read.tools else ""
        messages.append(
            Message(0, line.session_id, line.turn, place, line.at or 0.0, read.role, tools, None, read.text)
        )
    finish_reason = None if line.finish_reason is None else name_of(line.finish_reason)
    messages[-1] = msgspec.structs.replace(messages[-1], finish_reason=finish_reason)
    return messages, made
