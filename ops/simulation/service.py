"""The service of one API process, put together as `app.main` does it, over any database, engine and clock."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from sqlalchemy import insert

from app.service.cache import SessionCache
from app.service.claims import Claims
from app.service.engine_pool import EnginePool
from app.service.fleet import FleetState
from app.service.follow import Followers
from app.service.gates import Gates
from app.service.janitor import Janitor
from app.service.judge import Judge, Workers
from app.service.pauses import Pauses
from app.service.recovery import BEATS_PER_LEASE, Recovery
from app.service.session_control import SessionControls
from app.service.sessions import Sessions
from app.service.token_in import TokenIn
from app.service.turns import Turns
from app.settings import Settings
from app.store import incarnations, reads, schema
from app.store.dialect import Tx, now
from app.store.log_sessions import SaveSnapshot
from app.store.ports import Database
from app.store.writer import Writer
from app.upstream.client import EngineClient
from app.upstream.control import EngineControl
from app.upstream.engines import Engines
from app.upstream.sessions import EngineSessions
from workers import codec

DRAIN_S = 10.0


class Service:
    """Runs from `start` to `stop`, as the registered `incarnation`."""

    def __init__(
        self,
        database: Database,
        client: EngineClient,
        pool: Workers,
        settings: Settings,
        clock: Callable[[], float],
        incarnation: int,
        lease_left: Callable[[int], Awaitable[float | None]],
        poll_s: float,
    ) -> None:
        self.incarnation = incarnation
        self.writer = Writer(database)
        self.cache = SessionCache(database, self.writer, settings.cache_bytes)
        lease_s = math.inf if database.is_sqlite else settings.lease_s
        followers = Followers()
        self._recovery = Recovery(
            database, self.writer, lambda: incarnation, lease_s, settings.lease_s / BEATS_PER_LEASE, clock
        )
        self._claims = Claims(
            cache=self.cache,
            writer=self.writer,
            followers=followers,
            clock=clock,
            incarnation=lambda: incarnation,
            lease_s=self._recovery.lease_to_judge_by,
            lease_left=lease_left,
        )
        self._token_in = TokenIn(self.cache, None)
        self.fleet = FleetState(database, self.writer, poll_s)
        engines = Engines(client, settings.placement)
        self.engine_pool = EnginePool(self.fleet, engines, settings.upstreams)
        self.gates = Gates(self.fleet)
        self.pauses = Pauses(
            fleet=self.fleet,
            gates=self.gates,
            engines=engines,
            control=EngineControl(client, settings.upstream_dialect, settings.upstream_api_key),
            database=database,
        )
        controls = SessionControls(
            database=database,
            writer=self.writer,
            cache=self.cache,
            engines=engines,
            calls=EngineSessions(client, settings.upstream_api_key),
            settings=settings,
            incarnation=lambda: incarnation,
            lease_s=self._recovery.lease_to_judge_by,
        )
        self.turns = Turns(
            cache=self.cache,
            claims=self._claims,
            writer=self.writer,
            engines=engines,
            fleet=self.fleet,
            gates=self.gates,
            judge=Judge(pool, settings),
            token_in=self._token_in,
            controls=controls,
            settings=settings,
            clock=clock,
        )
        self.sessions = Sessions(database, self.writer, self.cache, followers, clock)
        self.sessions.on_close(self.turns.close)
        self._janitor = Janitor(database, self.writer, self.sessions, settings, clock)

    async def start(self) -> None:
        """Raises AppError where the store cannot be read."""
        self.writer.start()
        await self.fleet.start()
        self._janitor.start()
        self._recovery.start()
        self.pauses.start()

    async def stop(self) -> None:
        """An orderly end, in the order of `app.main`. Raises AppError where the store cannot be told."""
        await self._janitor.stop()
        await self.turns.drain(DRAIN_S)
        self._token_in.close()
        await self._claims.close()
        await self.pauses.stop()
        await self.engine_pool.stop()
        await self.fleet.stop()
        await self.cache.close()
        await self.writer.stop()
        await self._recovery.stop()

    async def snapshot(self, session_id: str) -> None:
        """Save a fold of the session, as a process does with one of a thousand events. Raises AppError."""
        live = await self.cache.get(session_id)
        if live is not None:
            session = live.session
            await self.writer.submit(
                SaveSnapshot(session_id, session.version, reads.SNAPSHOT_FORMAT, codec.pack(session))
            )


_register_elsewhere = (
    insert(schema.incarnations)
    .values(host="", pid=1, started_at=now(), heartbeat_at=now())
    .returning(schema.incarnations.c.id)
)


def register(tx: Tx, name: str, *, alone: bool) -> int:
    """A new incarnation; where there are several processes, each is on a host of its own, called `name`."""
    if alone:
        return incarnations.register(tx, alone=True)
    row = tx.one(_register_elsewhere, {"host": name})
    assert row is not None
    return int(row[0])
