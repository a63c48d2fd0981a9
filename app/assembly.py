"""Builds the components of one API process that serve turns, for `app.main` and for the simulation.

What the simulation replaces is passed in: the database, the clock, the engine client, the worker pool, and the
process's registration.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from app.domain.proofs import Proofs
from app.fleet.engine_pool import EnginePool
from app.fleet.engines import Engines
from app.fleet.gates import Gates
from app.fleet.native import NativeRoutes
from app.fleet.pauses import Pauses
from app.fleet.state import POLL_S, FleetState
from app.fleet.versions import WeightVersions
from app.sessions.cache import SessionCache
from app.sessions.checkpoints import Checkpoints
from app.sessions.erasure import Erasure
from app.sessions.event_log import Followers
from app.sessions.forks import Forks
from app.sessions.janitor import Janitor
from app.sessions.lifecycle import Clock, Sessions
from app.sessions.recovery import BEATS_PER_LEASE, Recovery
from app.sessions.restores import Restores
from app.settings import Settings
from app.store.objects.objects import Objects
from app.store.ports import Database
from app.store.writer import Writer
from app.turn.claims import Claims
from app.turn.large_bodies import LargeBodies
from app.turn.placement import Placement
from app.turn.retries import Retries
from app.turn.services import TurnServices
from app.turn.session_control import SessionControls
from app.turn.staging import Staging
from app.turn.token_in import TokenIn
from app.turn.turns import Turns
from app.turn.validation import ReplyValidator, Workers
from app.upstream.client import EngineClient
from app.upstream.control import EngineControl
from app.upstream.sessions import EngineSessions

if TYPE_CHECKING:
    from app.tito.prompts import Prompts

LeaseLeft = Callable[[int], Awaitable[float | None]]
"""Seconds that are left of a process's lease; None if it is dead."""

DRAIN_S = 10.0
"""How long a stopping process waits for turns whose client has disconnected."""


class Assembly:
    """Call in this order: `open`, `start`, `registered` once the process is registered in the store, `drain`, `stop`.

    `clock` returns seconds since the epoch. `incarnation` returns this process's number in the store and raises before
    registration. `lease_left` defaults to `Recovery.lease_left`. `prompts` is given if there is a tokenizer. The
    fleet's log is polled every `poll_s` seconds.
    """

    def __init__(
        self,
        *,
        database: Database,
        client: EngineClient,
        pool: Workers,
        settings: Settings,
        clock: Clock,
        incarnation: Callable[[], int],
        lease_left: LeaseLeft | None = None,
        prompts: Prompts | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self.writer = Writer(database)
        self.cache = SessionCache(database, self.writer, settings.cache_bytes, with_tokens=prompts is not None)
        self.followers = Followers()
        # With SQLite only the file's lock decides which process is alive.
        lease_s = math.inf if database.is_sqlite else settings.lease_s
        beat_s = settings.lease_s / BEATS_PER_LEASE
        self._recovery = Recovery(database, self.writer, incarnation, lease_s, beat_s, clock)
        self.token_in = TokenIn(self.cache, prompts)
        self.fleet = FleetState(database, self.writer, poll_s)
        self.engines = self._engines(client, settings)
        self.engine_pool = EnginePool(self.fleet, self.engines, settings.upstreams)
        self.gates = Gates(self.fleet)
        self.pauses = Pauses(
            fleet=self.fleet,
            gates=self.gates,
            engines=self.engines,
            control=EngineControl(client, settings.upstream_dialect, settings.upstream_api_key),
            database=database,
        )
        self.retries = Retries(
            cache=self.cache,
            writer=self.writer,
            followers=self.followers,
            clock=clock,
            incarnation=incarnation,
            lease_s=self._recovery.lease_to_judge_by,
        )
        self._claims = self._make_claims(settings, clock, incarnation, lease_left)
        self._controls = self._session_controls(database, client, settings, incarnation)
        self.native = NativeRoutes(client, self.engines, settings.upstream_api_key)
        self.staging = Staging(database, self.writer, settings, incarnation)
        self.proofs = Proofs(settings.session_secret or settings.admin_token)
        self.objects: Objects | None = None
        if database.bucket is not None:
            lease = self._recovery.lease_to_judge_by
            keep_s = settings.payloads_keep_s
            self.objects = Objects(database, self.writer, database.bucket, incarnation, lease, keep_s=keep_s)
        self.turns = self._turns(pool, settings, clock)
        self.sessions = Sessions(
            database,
            self.writer,
            self.cache,
            self.followers,
            clock,
            names_engine_sessions=settings.engine_session_ids,
        )
        self.erasure = Erasure(
            database=database,
            writer=self.writer,
            cache=self.cache,
            followers=self.followers,
            clock=clock,
            sessions=self.sessions,
            objects=self.objects,
        )
        self.forks = Forks(database, self.writer, self.sessions, clock, self.objects)
        self.sessions.on_close(self.turns.close)
        self.sessions.on_close(self._controls.session_closed)
        self.checkpoints = self._checkpoints(database, clock, incarnation, lease_left)
        self.janitor = Janitor(database, self.writer, self.sessions, self.erasure, settings, clock)

    def _engines(self, client: EngineClient, settings: Settings) -> Engines:
        versions = WeightVersions(self.fleet, client, settings.upstream_api_key)
        return Engines(
            client,
            settings.placement,
            settings.upstream_api_key,
            versions,
            configured=settings.upstream_dialect,
            logprobs_of=None if settings.logprobs_mode == "auto" else settings.logprobs_mode,
        )

    def _make_claims(
        self, settings: Settings, clock: Clock, incarnation: Callable[[], int], lease_left: LeaseLeft | None
    ) -> Claims:
        return Claims(
            retries=self.retries,
            settings=settings,
            cache=self.cache,
            writer=self.writer,
            followers=self.followers,
            clock=clock,
            incarnation=incarnation,
            lease_s=self._recovery.lease_to_judge_by,
            lease_left=lease_left or self._recovery.lease_left,
        )

    def _session_controls(
        self, database: Database, client: EngineClient, settings: Settings, incarnation: Callable[[], int]
    ) -> SessionControls:
        return SessionControls(
            database=database,
            writer=self.writer,
            cache=self.cache,
            engines=self.engines,
            calls=EngineSessions(client, settings.upstream_api_key),
            settings=settings,
            incarnation=incarnation,
            lease_s=self._recovery.lease_to_judge_by,
        )

    def _checkpoints(
        self, database: Database, clock: Clock, incarnation: Callable[[], int], lease_left: LeaseLeft | None
    ) -> Checkpoints:
        return Checkpoints(
            database=database,
            writer=self.writer,
            fleet=self.fleet,
            gates=self.gates,
            restores=Restores(
                database=database,
                writer=self.writer,
                cache=self.cache,
                followers=self.followers,
                sessions=self.sessions,
                clock=clock,
            ),
            incarnation=incarnation,
            lease_left=lease_left or self._recovery.lease_left,
            on_delete=lambda: self.janitor.look_again(),
        )

    def _turns(self, pool: Workers, settings: Settings, clock: Clock) -> Turns:
        return Turns(
            TurnServices(
                cache=self.cache,
                claims=self._claims,
                retries=self.retries,
                writer=self.writer,
                objects=self.objects,
                engines=self.engines,
                fleet=self.fleet,
                gates=self.gates,
                placement=Placement(self.engines, self.cache, settings, clock),
                validator=ReplyValidator(pool, settings),
                staging=self.staging,
                native=self.native,
                token_in=self.token_in,
                controls=self._controls,
                large_bodies=LargeBodies(),
                proofs=self.proofs,
                settings=settings,
                clock=clock,
            )
        )

    async def open(self) -> None:
        """Start writing and reading, without turns yet. Raises AppError if the fleet's log cannot be read."""
        self.writer.start()
        await self.fleet.start()

    def start(self) -> None:
        """Start the background tasks."""
        self.engine_pool.start()
        self.janitor.start()
        self.pauses.start()

    def registered(self) -> None:
        """The process is registered in the store, so it may take over from dead ones."""
        self._recovery.start()
        self._claims.start()
        if self.objects is not None:
            self.objects.start()
        self._controls.start()
        self.checkpoints.start()

    async def drain(self) -> None:
        """Wait at most DRAIN_S for the turns in flight, then send engines what is still due."""
        async with AsyncExitStack() as ends:
            ends.push_async_callback(self._controls.stop)
            ends.push_async_callback(self.turns.drain, DRAIN_S)
            ends.push_async_callback(self.checkpoints.stop)
            ends.push_async_callback(self.janitor.stop)
            if self.objects is not None:
                ends.push_async_callback(self.objects.stop)

    async def stop(self) -> None:
        """Stop all components, users before what they use. Allowed without `open`."""
        async with AsyncExitStack() as ends:
            for end in (
                self._recovery.stop,
                self.writer.stop,
                *(() if self.objects is None else (self.objects.finish_uploads,)),
                self.cache.close,
                self._claims.close,
                self.retries.close,
                self.fleet.stop,
                self.engine_pool.stop,
                self.pauses.stop,
            ):
                ends.push_async_callback(end)
            ends.callback(self.token_in.close)
