"""A reader of the log of all sessions, which goes on while others write: it must see every event once and in order.

The events of a session that has left the log come again when it returns.
"""

from __future__ import annotations

import asyncio
import random

from sqlalchemy import ARRAY, BigInteger, Connection, func, select

from app.domain.events import RewardAssigned
from app.errors import StoreUnavailable
from app.store import feed
from app.store.feed import START, EventFilter, Position, last_forgotten
from app.store.schema import events
from tests.tools.simulation.database import ProcessDatabase
from tests.tools.simulation.world import World

LOOKS_S = (0.1, 2.0, 2.0)
"""Each look costs two statements, so most schedules have few."""

PAGE = 20


class Tail:
    """`end` and `page` as `app.sessions.all_events` asks for them, over a database of its own."""

    def __init__(self, world: World, database: ProcessDatabase, seed: int) -> None:
        self._world = world
        self._database = database
        self._rng = random.Random(f"tail {seed}")
        self._look_s = self._rng.choice(LOOKS_S)
        self._after = START
        self._seen: list[Position] = []
        self._newest: dict[str, tuple[int, Position]] = {}

    async def follow(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / self._look_s))
            try:
                await self._read()
            except StoreUnavailable as error:
                self._world.note(f"the reader: {error}")

    async def _read(self) -> None:
        upto = max(self._after, await self._database.read(feed.end))
        while self._after < upto:
            after = self._after
            page = await self._database.read(lambda c: feed.page(c, after, upto, EventFilter(), PAGE))  # noqa: B023
            for row in page.rows:
                assert row.session_id is not None
                assert row.row is not None
                self._seen.append(row.place)
                before, place = self._newest.get(row.session_id, (0, START))
                self._world.must(
                    row.row.seq == before + 1 or self._has_left(place),
                    f"a reader of all events saw event {row.row.seq} of {row.session_id} behind {before}",
                )
                self._newest[row.session_id] = row.row.seq, row.place
            self._after = page.reached

    def _has_left(self, place: Position) -> bool:
        """Has the session of this event been taken out of the log since?"""
        forgotten = self._world.store.read(last_forgotten)
        return START < forgotten >= place

    async def finish(self) -> None:
        """Nobody writes any more. Raises StoreUnavailable."""
        await self._read()
        there = self._world.store.read(_places)
        missed = set(there).difference(self._seen)
        self._world.must(not missed, f"a reader of all events has passed {len(missed)} of {len(there)}")
        for name, seqs in self._world.store.read(_repeated):
            self._world.history.problem(
                f"rewards {seqs} of {name} are the same: a transaction that was done was repeated"
            )
        self._world.must(
            self._seen == sorted(set(self._seen)), "a reader of all events saw some twice, or not in order"
        )


def _places(connection: Connection) -> list[Position]:
    query = select(events.c.tx, events.c.position).order_by(events.c.tx, events.c.position)
    return [Position(*row) for row in connection.execute(query)]


def _repeated(connection: Connection) -> list[tuple[str, list[int]]]:
    """Rewards of a session that were given at the same moment and are the same: clients draw each anew."""
    columns = events.c.session_id, events.c.type, events.c.at, events.c.data
    seqs = func.array_agg(events.c.seq, type_=ARRAY(BigInteger))
    query = select(events.c.session_id, seqs).where(events.c.type == RewardAssigned.__name__)
    query = query.group_by(*columns).having(func.count() > 1)
    return [(row[0], row[1]) for row in connection.execute(query)]
