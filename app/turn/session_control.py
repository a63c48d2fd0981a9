"""`nvext.session_control`: engines that clients bind to a name, and sessions that engines hold under it.

    action   before the engine is asked                           after the turn
    open     choose an engine, have it open its session, bind      -
    bind     choose an engine, bind                                -
    absent   go to the bound engine                                -
    close    unbind; go to the engine once more                    tell the engine, once

What stands in between is in the store (`store.affinities`), so that whoever outlives a process finishes what it began.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Literal, TypeVar

import msgspec

from app.domain.control import SessionControl
from app.domain.events import AffinityBound, AffinityReleased
from app.domain.session import Affinity, Session
from app.errors import AppError, SessionOpenFailed
from app.fleet.engines import EngineChoice, Engines
from app.sessions.cache import SessionCache
from app.settings import ALL, Settings
from app.store import affinities as store
from app.store.affinities import Ending
from app.store.log import Operation
from app.store.ports import Database, Writer
from app.tasks import cancelled
from app.upstream.sessions import EngineSessions, OpenUnknown

log = logging.getLogger("turnlog.session_control")

T = TypeVar("T")

LOOK_S = 0.05
"""How often a turn looks whether another one is done with the name."""

TICK_S, TICKS_A_SWEEP = 0.25, 4
"""Between looks at this process's own turns, and how many of those until the store is looked through."""

SLIDES_A_TIMEOUT = 3
"""How often a running turn says so before its name would expire."""

AGAIN_S = 1.0
"""Between tries to write what an engine has been told already."""

STOP_S = 5.0
"""How long a stopping process goes on telling engines; what is left then is found by the next."""


class SessionControls:
    """The names that turns of this process use, `incarnation()` to the store, and those that it ends for others.

    `lease_s()` of silence end another process.
    """

    def __init__(
        self,
        *,
        database: Database,
        writer: Writer,
        cache: SessionCache,
        engines: Engines,
        calls: EngineSessions,
        settings: Settings,
        incarnation: Callable[[], int],
        lease_s: Callable[[], float],
    ) -> None:
        self.engines = engines
        self.calls = calls
        self._incarnation = incarnation
        self.lease_s = lease_s
        self._database = database
        self._writer = writer
        self._cache = cache
        self._opted_in = settings.engine_sessions
        self._in_use: Counter[str] = Counter()
        self._turns: dict[str, ControlledTurn] = {}
        self._beside: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    @property
    def incarnation(self) -> int:
        """Raises StoreFull, StoreUnavailable while this process is not registered."""
        return self._incarnation()

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="turnlog-session-control")

    async def stop(self) -> None:
        """Engines are told what is due to them; what cannot be told by now is left to another process."""
        await cancelled(self._watching)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while self._beside:
                    await asyncio.wait(set(self._beside))
        await cancelled(*self._beside)

    def turn(self, control: SessionControl, session_id: str) -> ControlledTurn:
        """A turn that holds its session's claim; to be `finish`ed."""
        made = self._turns[session_id] = ControlledTurn(self, control, session_id)
        self._in_use[control.session_id] += 1
        return made

    def finished(self, turn: ControlledTurn) -> None:
        del self._turns[turn.session_id]
        self._free(turn.control.session_id)

    def session_closed(self, session_id: str, ended: Sequence[int]) -> None:
        """The session is closed: end what it used last, once its turn here has ended.

        A session that is known to have no such affinity need not be looked for.
        """
        known = self._cache.known(session_id)
        if known is None or session_id in self._turns or (known.affinity is not None and known.affinity.control):
            self._start(self._end_of(session_id))

    async def submit(self, operation: Operation[T]) -> T:
        return await self._writer.submit(operation)

    def holding(self) -> frozenset[str]:
        """The engines that may hold sessions: the operator says so, and they have not said that they cannot."""
        everywhere = self._opted_in == ALL
        members = self.engines.members.values()
        return frozenset(
            one.url for one in members if one.sessions is not False and (everywhere or one.url in self._opted_in)
        )

    def learn(self, engine: str, holds: bool) -> None:
        """Whether an engine holds sessions, which is forgotten when it is restarted."""
        member = self.engines.members.get(engine)
        if member is None or member.sessions is holds:
            return
        member.sessions = holds
        if not holds:
            log.warning("%s cannot hold sessions: session_control binds names to it, and opens nothing there", engine)

    def beside(self, control_id: str, work: Awaitable[None]) -> asyncio.Task[None]:
        """Do it whatever becomes of the turn; nobody else ends the name meanwhile."""
        self._in_use[control_id] += 1
        return self._start(self._using(control_id, work))

    @contextlib.contextmanager
    def waiting(self, control_id: str) -> Iterator[None]:
        """Who waits for a name does not use it: what is left of a turn that was cut off can be ended meanwhile."""
        self._free(control_id)
        try:
            yield
        finally:
            self._in_use[control_id] += 1

    async def tell(self, ending: Ending) -> None:
        """Tell the engine, and say that it has been told."""
        await self.calls.close(ending.engine, ending.control_id)
        await self.written(store.Ended(ending.control_id, self.incarnation))

    async def written(self, operation: Operation[T]) -> T:
        """Tried again until the store can take it: nobody waits for it."""
        while True:
            try:
                return await self._writer.submit(operation)
            except AppError as error:
                log.warning("an affinity could not be written yet: %s", error)
            await asyncio.sleep(AGAIN_S)

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    async def _using(self, control_id: str, work: Awaitable[None]) -> None:
        try:
            await work
        finally:
            self._free(control_id)

    def _free(self, control_id: str) -> None:
        self._in_use[control_id] -= 1
        if not self._in_use[control_id]:
            del self._in_use[control_id]

    async def _end_of(self, session_id: str) -> None:
        running = self._turns.get(session_id)
        if running is not None:
            await running.over.wait()
            await running.aborted()
        try:
            if not await self._database.read(lambda connection: store.used_last_by(connection, session_id)):
                return
            end = store.EndOf(session_id, self.incarnation)
        except AppError as error:
            log.warning("what session %s used last could not be looked up, it will expire: %s", session_id, error)
            return
        async with self._ending:
            self._tell_all(await self.written(end))

    async def _watch(self) -> None:
        tick = 0
        while True:
            try:
                await self._slide()
                if tick % TICKS_A_SWEEP == 0:
                    await self._sweep()
            except AppError as error:
                log.warning("affinities could not be looked through: %s", error)
            except Exception:
                log.exception("an unexpected fault in looking through the affinities")
            tick += 1
            await asyncio.sleep(TICK_S)

    async def _slide(self) -> None:
        """Names do not expire while a turn that uses them runs."""
        now = asyncio.get_running_loop().time()
        running = [turn for turn in self._turns.values() if turn.slides_at <= now]
        if running:
            await self._writer.submit(store.Slide([turn.control.session_id for turn in running]))
            for turn in running:
                turn.has_slid()

    async def _sweep(self) -> None:
        lease_s = self.lease_s()
        found = await self._database.read(lambda connection: store.due(connection, lease_s))
        if not any(row.may_be_ended(self.incarnation, self._in_use) for row in found):
            return
        async with self._ending:
            due = store.EndDue(self.incarnation, lease_s, frozenset(self._in_use))
            self._tell_all(await self._writer.submit(due))

    def _tell_all(self, endings: Sequence[Ending]) -> None:
        """From here on their names are in use; whoever looks for names that are not has to wait until then."""
        for ending in endings:
            self.beside(ending.control_id, self.tell(ending))


class ControlledTurn:
    """One turn of a session, and what it asks of the engine that holds it.

    `state` is that of the name as far as this turn has to do with it: `elsewhere` says that others have changed it.
    """

    def __init__(self, controls: SessionControls, control: SessionControl, session_id: str) -> None:
        self.control = control
        self.session_id = session_id
        self.over = asyncio.Event()
        self.slides_at = float("inf")
        self._controls = controls
        self._state: Literal["unbound", "bound", "opening", "closing", "released", "elsewhere"] = "unbound"
        self._has_asked = False
        self._engine = ""
        self._timeout_s = 0.0
        self._aborts: Collection[asyncio.Task[None]] = ()
        self._cause: Literal["control", "listed", "draining", "dead"] = "control"

    @property
    def _key(self) -> tuple[str, str, int]:
        return self.control.session_id, self.session_id, self._controls.incarnation

    def has_slid(self) -> None:
        now = asyncio.get_running_loop().time()
        self.slides_at = now + self._timeout_s / SLIDES_A_TIMEOUT if self._state == "bound" else float("inf")

    async def place(self, ordinary: EngineChoice) -> EngineChoice:
        """Where the turn goes, instead of where it would go without control. Raises StoreUnavailable, Overloaded."""
        await self._use(ordinary.order.first)
        if self._state == "unbound":
            return ordinary
        order = self._controls.engines.order(self.session_id, self._engine)
        return msgspec.structs.replace(ordinary, order=order, control=self)

    async def _use(self, candidate: str) -> None:
        """Ask for the name until nobody else is at it; a new binding would be to `candidate`."""
        controls = self._controls
        while True:
            used = await controls.submit(
                store.Use(
                    self.control,
                    self.session_id,
                    controls.incarnation,
                    controls.lease_s(),
                    candidate,
                    controls.holding(),
                )
            )
            if used.state == "ending":
                ending = Ending(self.control.session_id, used.engine)
                await asyncio.shield(controls.beside(ending.control_id, controls.tell(ending)))
            elif used.state == "held":
                with controls.waiting(self.control.session_id):
                    await asyncio.sleep(LOOK_S)
            else:
                break
        self._state, self._engine, self._timeout_s = used.state, used.engine, used.timeout_s
        self._has_asked = True
        self.has_slid()

    async def prepare(self, engine: str) -> None:
        """The turn is about to be sent to `engine`. Raises NotSent, SessionOpenFailed, StoreUnavailable."""
        if engine != self._engine and self._state in ("bound", "opening"):
            await self._move(engine)
        if self._state == "opening":
            await self._open(engine)

    async def _move(self, engine: str) -> None:
        """The bound engine is gone: bind the name to this one. A session that it held is of no more use."""
        controls, old = self._controls, self._engine
        moved = await controls.submit(store.Move(*self._key, old, engine, controls.holding()))
        if moved is None:
            self._state = "elsewhere"
            return
        if self._state == "bound":
            self._cause = controls.engines.why_not(old) or "dead"
        self._engine, self._state = engine, "opening" if moved.opening else "bound"
        if moved.left:
            controls.beside(self.control.session_id, controls.calls.close(old, self.control.session_id))

    async def _open(self, engine: str) -> None:
        """Where it is unknown whether the engine did, or the turn is cut off meanwhile, `finish` ends it."""
        controls, control_id = self._controls, self.control.session_id
        try:
            holds = await controls.calls.open(engine, control_id, self._timeout_s)
        except OpenUnknown:
            raise
        except SessionOpenFailed:
            await controls.submit(store.NotOpened(*self._key))
            self._state = "unbound"
            raise
        controls.learn(engine, holds)
        is_mine = await controls.submit(store.Opened(*self._key, holds))
        self._state = "bound" if is_mine else "elsewhere"
        self.has_slid()

    def binding(self, session: Session, engine: str) -> AffinityBound | AffinityReleased | None:
        """What the turn's commit says of the engine that answered."""
        if self._state in ("closing", "released"):
            return None if session.affinity is None else AffinityReleased("closed")
        if session.affinity == Affinity(engine, self.control.session_id):
            return None
        return AffinityBound(engine, self._cause if session.affinity else "control", self.control.session_id)

    def finish(self, aborts: Collection[asyncio.Task[None]]) -> None:
        """The turn has ended, however it did; `aborts` may still have to end its generation."""
        self._aborts = aborts
        if self._state in ("opening", "closing") or (self.control.action == "close" and not self._has_asked):
            self._controls.beside(self.control.session_id, self._end())
        self.over.set()
        self._controls.finished(self)

    async def aborted(self) -> None:
        """The engine has been told to end the turn's generation, if need be."""
        if self._aborts:
            await asyncio.wait(self._aborts)

    async def _end(self) -> None:
        """Also where the turn came to nothing before it was sent: that it closes the name stands."""
        await self.aborted()
        if not self._has_asked:
            try:
                await self._use("")
            except AppError as error:
                log.warning("name %s could not be closed, it will expire: %s", self.control.session_id, error)
                return
        ending = await self._controls.written(store.End(*self._key))
        if ending is not None:
            await self._controls.tell(ending)
