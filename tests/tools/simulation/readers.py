"""Readers in a schedule: of the events of all sessions, of exports page by page, and of the list of sessions."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import select

from app.domain.events import TurnCommitted
from app.errors import AppError, InvalidRequest, PositionGone
from app.export.query import ExportQuery, decode_cursor
from app.features.archive.schema import archived
from app.sessions.all_events import EventQuery
from app.sessions.log_end import decode_position
from app.sessions.session_list import SessionQuery
from app.store import feed
from app.store.feed import END, START, EventFilter, Position, last_forgotten, written_at
from app.store.ports import Connection
from app.store.schema import events
from app.store.sessions import HeadFilter, HeadRow, decode_events, list_heads, load_head
from tests.tools.simulation import rows
from tests.tools.simulation.process import Disconnected, Process
from tests.tools.simulation.world import World

T = TypeVar("T")

SHARE = 0.15
"""Of the schedules."""

AGAIN_S = 0.5

FILTERS = (
    EventFilter(),
    EventFilter(),
    EventFilter(types=("TurnCommitted", "SessionClosed")),
    EventFilter(session_id="s1"),
)

Event = tuple[str, int, float]
"""Its session, number and time."""

SAID = ("turn", "excluded", "segment", "branch", "tokens", "loss_mask", "logprobs", "reward", "status", "final")
"""What of a row changes only with an event that makes its session come again in the next window."""


class NotAsked(Exception):
    """Nobody has answered."""


async def ask(world: World, what: str, work: Callable[[Process], Coroutine[Any, Any, T]]) -> T:
    """What a process answers. Raises NotAsked, InvalidRequest and PositionGone."""
    process = world.pick()
    if process is None:
        raise NotAsked
    try:
        async with asyncio.timeout(world.weather.patience_s):
            return await process.call(lambda: work(process), lambda _: None)
    except (InvalidRequest, PositionGone):
        raise
    except (AppError, Disconnected, TimeoutError) as error:
        world.note(f"{what}: {type(error).__name__} {error}")
        raise NotAsked from error


class EventReader:
    """Has each event once, in the order of the log, whatever process it asks; anew where a crash undid its position.
    Those of a session that came back from an archive have new places, and come again."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._wanted = rng.choice(FILTERS)
        self._position: str | None = None
        self._seen: dict[Position, Event] = {}

    async def read(self, follow_s: float = 0.0, limit: int | None = None) -> bool:
        """Go on behind the last line that came, and follow for so long. Was it answered to its end?"""
        came: list[bytes] = []
        query = EventQuery(self._position, follow_s > 0, limit, self._wanted)

        async def lines(process: Process) -> None:
            async with contextlib.aclosing(await process.service.all_events.start(query)) as pieces:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(follow_s or None):
                        async for piece in pieces:  # It has left the process, whatever becomes of that.
                            came.extend(piece.splitlines())

        try:
            await ask(self._world, "events", lines)
            return True
        except PositionGone as error:
            self._world.must(self._is_undone(), f"an event is there, and yet: {error}")
            self._position, self._seen = None, {}
        except NotAsked:
            pass
        finally:
            for line in came:
                self._take(msgspec.json.decode(line))
        return False

    def _take(self, line: Mapping[str, Any]) -> None:
        self._position = line["position"]
        if "seq" in line:
            place = decode_position(self._position, "a reader").place
            self._world.must(place > max(self._seen, default=START), f"an event came at {place}, out of order")
            self._seen[place] = (line["session_id"], line["seq"], line["at"])

    def _is_undone(self) -> bool:
        """Is another event, or none, at the place that the reader has come to, and not because its session left?"""
        assert self._position is not None
        known = decode_position(self._position, "a reader")
        at = self._world.store.read(lambda connection: written_at(connection, known.place))
        return at != known.at and not (at is None and known.place <= self._world.store.read(last_forgotten))

    def _log(self) -> dict[Position, Event]:
        query = select(events.c.tx, events.c.position, events.c.session_id, events.c.seq, events.c.at)
        if self._wanted.session_id is not None:
            query = query.where(events.c.session_id == self._wanted.session_id)
        if self._wanted.types:
            query = query.where(events.c.type.in_(self._wanted.types))
        found = self._world.store.read(lambda connection: connection.execute(query).all())
        return {Position(row[0], row[1]): (row[2], row[3], row[4]) for row in found}

    async def live(self) -> None:
        for _ in range(self._rng.randint(2, 8)):
            await asyncio.sleep(self._rng.expovariate(0.5))
            await self.read(self._rng.choice((0.0, 1.5)), self._rng.choice((None, 1, 5)))

    async def finish(self) -> None:
        """Never ends where the reader is never answered."""
        while not await self.read():
            await asyncio.sleep(AGAIN_S)
        log, left = self._log(), _left(self._world)
        lacks = sorted(place for place, event in log.items() if self._seen.get(place) != event)
        more = sorted(place for place, event in self._seen.items() if place not in log and event[0] not in left)
        self._world.must(not lacks and not more, f"a reader lacks the events at {lacks}, and has others at {more}")


class Mirror:
    """Keeps the newest rows of each session, by exports of one window after the other, a few rows at a time."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._begin()

    def _begin(self) -> None:
        self._cursor: str | None = None
        self._rows: dict[str, list[rows.Row]] = {}
        self._window: list[rows.Row] = []
        self._opened_at: float | None = None
        self._first: tuple[str, list[rows.Row]] | None = None

    async def page(self, limit: int | None) -> bool:
        """The next rows. Was that the end of the window?"""
        cursor, asked_at = self._cursor, self._world.loop.time()
        try:
            given, here, following = await self._export(cursor, limit)
        except InvalidRequest as error:
            epoch = self._world.store.read(feed.epoch)
            is_old = cursor is not None and decode_cursor(cursor).epoch != epoch
            self._world.must(is_old, f"a cursor of this epoch was refused: {error}")
            self._begin()
            return False
        if cursor is not None:
            epoch = self._world.store.read(feed.epoch)
            self._world.must(decode_cursor(cursor).epoch == epoch, "a cursor of an older epoch was taken")
        if self._opened_at is None:
            self._opened_at, self._pinned = asked_at, here
        self._window += given
        if given and limit is not None:
            self._cursor = given[-1]["cursor"]
            return False
        self._cursor = following
        self._close_window()
        return True

    def _close_window(self) -> None:
        assert self._opened_at is not None
        for session_id in {row["session_id"] for row in self._window}:
            self._rows[session_id] = [row for row in self._window if row["session_id"] == session_id]
        there = {one for every in self._rows.values() for row in every for one in _turns(row)}
        moved = _left(self._world)  # What came back is in a later window.
        for turn in self._world.history.turns:
            if turn.session_id in moved:
                continue
            is_due = turn.sent_at < self._opened_at and (turn.session_id, turn.turn) not in there
            if is_due and self._is_within(turn.session_id, turn.turn) and self._is_first_epoch():
                self._world.must(
                    False, f"an export lacks turn {turn.turn} of {turn.session_id}, which was there before"
                )
        self._first = self._first or (self._pinned, self._window)
        self._window, self._opened_at = [], None

    def _is_within(self, session_id: str, turn: int) -> bool:
        """Can the window have the turn? A PostgreSQL transaction that lasts keeps newer commits behind its end."""
        if self._is_erased(session_id):
            return False
        if not self._world.store.commits:
            return True
        high = decode_cursor(self._pinned).high
        assert high is not None
        committed = EventFilter(types=("TurnCommitted",), session_id=session_id)
        page = self._world.store.read(lambda connection: feed.page(connection, START, END, committed, 1_000_000))
        for placed in page.rows:
            assert placed.row is not None
            [recorded] = decode_events([placed.row])
            if isinstance(recorded.event, TurnCommitted) and recorded.event.turn == turn:
                return placed.place <= high
        return True

    def _is_first_epoch(self) -> bool:
        """Has no restore undone turns?"""
        return self._world.store.read(feed.epoch) == "1"

    async def _export(self, cursor: str | None, limit: int | None) -> tuple[list[rows.Row], str, str]:
        """Rows, this window's cursor and the next one's. Raises NotAsked, InvalidRequest."""

        async def export(process: Process) -> tuple[list[rows.Row], str, str]:
            made = await process.service.exporter.start(ExportQuery(explain=True, limit=limit), cursor)
            lines = b"".join([piece async for piece in made.pieces]).splitlines()
            return [msgspec.json.decode(line) for line in lines], made.cursor, made.next_cursor

        return await ask(self._world, "export", export)

    async def live(self) -> None:
        for _ in range(self._rng.randint(3, 9)):
            await asyncio.sleep(self._rng.expovariate(0.5))
            with contextlib.suppress(NotAsked):
                await self.page(self._rng.choice((1, 2, 2, 50, None)))

    async def finish(self) -> None:
        """All windows together are the whole, and the first of them is what it was. Never ends without an answer."""
        for _ in ("the window of before", "what came behind it"):
            while not await self._settled(lambda: self.page(self._rng.choice((1, 3)))):
                pass
        whole, _, _ = await self._settled(lambda: self._export(None, None))
        for problem in rows.problems((row for row in whole if "tokens" in row), self._world.history):
            self._world.history.problem(problem)
        for session_id in {*self._rows, *(row["session_id"] for row in whole)}:
            now = [_said(row) for row in whole if row["session_id"] == session_id]
            same = now == [_said(row) for row in self._rows.get(session_id, ())]
            must = self._world.must
            must(same or self._is_erased(session_id), f"the windows together have other rows of {session_id} than all")
        assert self._first is not None
        cursor, before = self._first
        again, _, _ = await self._settled(lambda: self._export(cursor, None))
        moved = _left(self._world)  # What came back is in a later window.
        kept, given = (
            [row for row in every if row["session_id"] not in moved and not self._is_erased(row["session_id"])]
            for every in (before, again)
        )
        same = [_said(row) for row in kept] == [_said(row) for row in given]
        self._world.must(same, "a window's cursor gives other rows than before")

    async def _settled(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        while True:
            try:
                return await work()
            except NotAsked:
                await asyncio.sleep(AGAIN_S)

    def _is_erased(self, session_id: str) -> bool:
        head = self._world.store.read(lambda connection: load_head(connection, session_id))
        return head is None or head.status == "erased"


def _left(world: World) -> set[str]:
    """The sessions that have ever left for a file."""
    query = select(archived.c.session_id)
    return set(world.store.read(lambda connection: connection.execute(query).scalars().all()))


def _said(row: rows.Row) -> dict[str, Any]:
    return {name: row[name] for name in SAID if name in row}


def _turns(row: rows.Row) -> list[tuple[str, int]]:
    """The turns that a row has, or of which it says why they are in none."""
    numbers = [span["turn"] for span in row["turns"]] if "turns" in row else [row.get("turn")]
    return [(row["session_id"], number) for number in numbers if number is not None]


class ListReader:
    """Reads the list of sessions by pages while sessions come and change."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng

    async def live(self) -> None:
        for _ in range(self._rng.randint(1, 3)):
            await asyncio.sleep(self._rng.expovariate(0.2))
            with contextlib.suppress(NotAsked):
                await self._walk(self._rng.choice(("created_at", "created_at", "updated_at", "reward")))

    async def _walk(self, sort: Any) -> None:
        """A session whose place does not change meanwhile comes once."""
        world, rng = self._world, self._rng
        query = SessionQuery(sort=sort, order=rng.choice(("asc", "desc")))
        before, cursor, listed = self._places(sort), None, list[str]()
        while True:
            page = await ask(world, "list", lambda p: p.service.session_list.page(query, cursor, rng.choice((1, 2))))  # noqa: B023
            listed += [row["session_id"] for row in page["sessions"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        after = self._places(sort)
        for session_id, place in before.items():
            if after.get(session_id) == place:
                count = listed.count(session_id)
                world.must(count == 1, f"{session_id} is {count} times in the list by {sort}, where it has stayed")

    def _places(self, sort: Any) -> dict[str, Any]:
        def read(connection: Connection) -> Sequence[HeadRow]:
            every = HeadFilter()
            return list_heads(connection, every, order="created_at", newest_first=False, after=None, limit=1000)

        return {head.session_id: getattr(head, sort) for head in self._world.store.read(read)}


class Readers:
    """One of each kind."""

    def __init__(self, world: World, seed: int) -> None:
        rng = random.Random(f"readers {seed}")
        self._kept = EventReader(world, rng), Mirror(world, rng)
        self._list = ListReader(world, rng)

    def lives(self) -> list[Coroutine[Any, Any, None]]:
        """What goes on during the storm."""
        return [*(one.live() for one in self._kept), self._list.live()]

    async def finish(self) -> None:
        """Nothing fails any more: they have all. Never ends where one is not answered."""
        for one in self._kept:
            await one.finish()


def draw(world: World, seed: int) -> list[Readers]:
    """Some in some schedules."""
    return [Readers(world, seed)] if random.Random(f"has readers {seed}").random() < SHARE else []
