"""`nvext.session_control`: engines that clients bind to a name, and sessions that engines hold under it.

    action   before the engine is asked                           after the turn
    open     choose an engine, have it open its session, bind      -
    bind     choose an engine, bind                                -
    absent   go to the bound engine                                -
    close    unbind; go to the engine once more                    tell the engine, once

The state between these steps is in the store (`affinities`): another process can finish what a dead one began.
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
from app.domain.events import DEFAULT_RUN, AffinityBound, AffinityReleased
from app.domain.names import first_id
from app.domain.session import Affinity, Session
from app.errors import AppError, SessionOpenFailed
from app.features.session_control import affinities as store
from app.features.session_control.affinities import Ending
from app.fleet.engines import Engines
from app.process import cancelled
from app.sessions.cache import SessionCache
from app.settings import ALL, Settings
from app.store.log import Operation, VoidedClaim
from app.store.ports import Database, Writer
from app.turn.in_flight import Claimed, EngineChoice
from app.upstream.sessions import EngineSessions, OpenUnknown

log = logging.getLogger("turnlog.session_control")

T = TypeVar("T")

NAME = "session_control"
"""The name of a turn's `ControlledTurn` in `InFlightTurn.features`."""

NAME_POLL_S = 0.05
"""Interval at which a turn checks whether another one has released the name."""

TICK_S, TICKS_A_SWEEP = 0.25, 4
"""Interval of the check of this process's own turns, and how many of those between two sweeps of the store."""

SLIDES_A_TIMEOUT = 3
"""How often a running turn extends its name's lifetime before the name would expire."""

WRITE_RETRY_S = 1.0
"""Pause between attempts to write what an engine has been told already."""

STOP_S = 5.0
"""How long a stopping process goes on telling engines; the rest is found by another process."""


class SessionControls:
    """The names that turns of this process use, and those that it ends for others.

    `incarnation()` is this process's id in the store. Another process is dead after `lease_s()` without a heartbeat.
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
        self._turns: list[ControlledTurn] = []
        self._background: set[asyncio.Task[None]] = set()
        self._ending = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    @property
    def incarnation(self) -> int:
        """Raises StoreFull, StoreUnavailable while this process is not registered."""
        return self._incarnation()

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="turnlog-session-control")

    async def stop(self) -> None:
        """Tell engines what is due; what cannot be told in time is left to another process."""
        await cancelled(self._watching)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while self._background:
                    await asyncio.wait(set(self._background))
        await cancelled(*self._background)

    def claimed(self, turn: Claimed) -> None:
        """The turn has its claim (`points.claimed`)."""
        if turn.request.control is not None:
            turn.flight.features[NAME] = self.turn(turn.request.control, turn.flight.session_id, turn.flight.run)

    async def placing(self, turn: Claimed, choice: EngineChoice) -> None:
        """The turn's name has its say (`points.placing`). Raises StoreUnavailable, Overloaded."""
        controlled: ControlledTurn = turn.flight.features[NAME]
        await controlled.place(choice)

    def ended(self, turn: Claimed) -> None:
        """A turn that had its claim has ended (`points.ended`)."""
        controlled: ControlledTurn | None = turn.flight.features.get(NAME)
        if controlled is not None:
            controlled.finish(turn.flight.aborts)

    def turn(self, control: SessionControl, session_id: str, run: str) -> ControlledTurn:
        """Begin a turn that holds its session's claim; call `finish` on it in the end."""
        turn = ControlledTurn(self, control, session_id, run)
        self._turns.append(turn)
        self._in_use[turn.control.session_id] += 1
        return turn

    def finished(self, turn: ControlledTurn) -> None:
        self._turns.remove(turn)
        self._stop_using(turn.control.session_id)

    def session_closed(self, session_id: str, ended: Sequence[VoidedClaim]) -> None:
        """The session was closed: end the name that it used last, after its turns here have ended.

        A cached session without such an affinity needs no look-up. One that the cache has still open has been used by
        another process since it was read.
        """
        known = self._cache.known(session_id)
        has_name = known is None or known.status == "open" or (known.affinity is not None and known.affinity.control)
        if has_name or self._running(session_id):
            self._create_task(self._end_used_by(session_id))

    async def submit(self, operation: Operation[T]) -> T:
        return await self._writer.submit(operation)

    def session_engines(self) -> frozenset[str]:
        """The engines that may hold sessions: enabled by the operator, and not known to lack the routes."""
        everywhere = self._opted_in == ALL
        members = self.engines.members.values()
        return frozenset(
            member.url
            for member in members
            if member.sessions is not False and (everywhere or member.url in self._opted_in)
        )

    def note_support(self, engine: str, holds: bool) -> None:
        """Remember whether an engine can hold sessions. It is forgotten when the engine restarts."""
        member = self.engines.members.get(engine)
        if member is None or member.sessions is holds:
            return
        member.sessions = holds
        if not holds:
            log.warning("%s does not support sessions: session_control only binds names to it", engine)

    def run_in_background(self, control_id: str, work: Awaitable[None]) -> asyncio.Task[None]:
        """Run `work` in the background, independent of the turn. Nobody else ends the name meanwhile."""
        self._in_use[control_id] += 1
        return self._create_task(self._run_using(control_id, work))

    @contextlib.contextmanager
    def not_using(self, control_id: str) -> Iterator[None]:
        """A turn that waits for a name does not use it, so that a cancelled turn's leftovers can be ended meanwhile."""
        self._stop_using(control_id)
        try:
            yield
        finally:
            self._in_use[control_id] += 1

    async def until_let_go(self, use: store.Use) -> None:
        """Wait until a name is no longer held. Raises StoreUnavailable."""
        held = True
        while held:
            await asyncio.sleep(NAME_POLL_S)
            held = await self._database.read(use.finds_it_held)

    async def close_at_engine(self, ending: Ending) -> None:
        """Tell the engine to close the session, and write that it was told."""
        await self.calls.close(ending.engine, ending.control_id)
        await self.write_with_retry(store.EngineTold(ending.control_id, self.incarnation))

    async def write_with_retry(self, operation: Operation[T]) -> T:
        """Write an operation, with retries until the store accepts it. Nobody waits for it."""
        while True:
            try:
                return await self._writer.submit(operation)
            except AppError as error:
                log.warning("an affinity could not be written yet: %s", error)
            await asyncio.sleep(WRITE_RETRY_S)

    def _create_task(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _run_using(self, control_id: str, work: Awaitable[None]) -> None:
        try:
            await work
        finally:
            self._stop_using(control_id)

    def _stop_using(self, control_id: str) -> None:
        self._in_use[control_id] -= 1
        if not self._in_use[control_id]:
            del self._in_use[control_id]

    async def _end_used_by(self, session_id: str) -> None:
        for running in self._running(session_id):
            await running.over.wait()
            await running.aborted()
        try:
            if not await self._database.read(lambda connection: store.used_last_by(connection, session_id)):
                return
            end = store.EndOf(session_id, self.incarnation)
        except AppError as error:
            log.warning("the last affinity of session %s could not be looked up, it will expire: %s", session_id, error)
            return
        async with self._ending:
            self._close_all(await self.write_with_retry(end))

    def _running(self, session_id: str) -> list[ControlledTurn]:
        return [turn for turn in self._turns if turn.session_id == session_id]

    async def _watch(self) -> None:
        tick = 0
        while True:
            try:
                await self._slide()
                if tick % TICKS_A_SWEEP == 0:
                    await self._sweep()
            except AppError as error:
                log.warning("affinities could not be checked: %s", error)
            except Exception:
                log.exception("unexpected error while checking affinities")
            tick += 1
            await asyncio.sleep(TICK_S)

    async def _slide(self) -> None:
        """Extend the names that running turns use, so that they do not expire."""
        now = asyncio.get_running_loop().time()
        running = [turn for turn in self._turns if turn.slides_at <= now]
        if running:
            await self._writer.submit(store.Slide([turn.control.session_id for turn in running]))
            for turn in running:
                turn.has_slid()

    async def _sweep(self) -> None:
        lease_s = self.lease_s()
        rows = await self._database.read(lambda connection: store.due(connection, lease_s))
        if not any(row.may_be_ended(self.incarnation, self._in_use) for row in rows):
            return
        async with self._ending:
            due = store.EndDue(self.incarnation, lease_s, frozenset(self._in_use))
            self._close_all(await self._writer.submit(due))

    def _close_all(self, endings: Sequence[Ending]) -> None:
        """Their names are in use from now on: a turn that wants one waits until the engine was told."""
        for ending in endings:
            self.run_in_background(ending.control_id, self.close_at_engine(ending))


class ControlledTurn:
    """One turn with session control, and the name that it uses: `control` has it as the store and the engines do.

    `_state` is the name's state as far as this turn is concerned; `elsewhere`: another process has changed it.
    """

    def __init__(self, controls: SessionControls, control: SessionControl, session_id: str, run: str) -> None:
        self.control = msgspec.structs.replace(control, session_id=_of_run(run, control.session_id))
        self.session_id = session_id
        self.run = run
        self._name = control.session_id
        self.over = asyncio.Event()
        self.slides_at = float("inf")
        self._controls = controls
        self._state: Literal["unbound", "bound", "opening", "closing", "released", "elsewhere"] = "unbound"
        self._has_acquired = False
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

    async def place(self, choice: EngineChoice) -> None:
        """Choose the turn's engine; `choice` is that without session control. Raises StoreUnavailable, Overloaded."""
        await self._acquire(choice.order.first)
        if self._state != "unbound":
            choice.order = self._controls.engines.order(self.run, self.session_id, self._engine)
            choice.control = self

    async def _acquire(self, candidate: str) -> None:
        """Request the name until no other turn uses it; a new binding would be to `candidate`."""
        controls, control_id = self._controls, self.control.session_id
        while True:
            engines = controls.session_engines()
            use = store.Use(self.control, self.session_id, controls.incarnation, controls.lease_s(), candidate, engines)
            outcome = await controls.submit(use)
            if outcome.state == "ending":
                told = controls.run_in_background(
                    control_id, controls.close_at_engine(Ending(control_id, outcome.engine))
                )
                await asyncio.shield(told)
            elif outcome.state == "held":
                # Looks and waits without a claim on the name: one of many turns that wait would always have one.
                with controls.not_using(control_id):
                    await controls.until_let_go(use)
            else:
                break
        self._state, self._engine, self._timeout_s = outcome.state, outcome.engine, outcome.timeout_s
        self._has_acquired = True
        self.has_slid()

    async def prepare(self, engine: str) -> None:
        """Prepare `engine` before the turn is sent to it. Raises NotSent, SessionOpenFailed, StoreUnavailable."""
        if engine != self._engine and self._state in ("bound", "opening"):
            await self._move(engine)
        if self._state == "opening":
            await self._open(engine)

    async def _move(self, engine: str) -> None:
        """The bound engine cannot be reached: bind the name to this one. A session at the old engine is useless now."""
        controls, old = self._controls, self._engine
        moved = await controls.submit(store.Move(*self._key, old, engine, controls.session_engines()))
        if moved is None:
            self._state = "elsewhere"
            return
        if self._state == "bound":
            self._cause = controls.engines.why_unavailable(old, self.run) or "dead"
        self._engine, self._state = engine, "opening" if moved.opening else "bound"
        if moved.left:
            controls.run_in_background(self.control.session_id, controls.calls.close(old, self.control.session_id))

    async def _open(self, engine: str) -> None:
        """Have the engine open its session. If the result is unknown, or the turn is cancelled, `finish` ends it."""
        controls, control_id = self._controls, self.control.session_id
        try:
            holds = await controls.calls.open(engine, control_id, self._timeout_s)
        except OpenUnknown:
            raise
        except SessionOpenFailed:
            await controls.submit(store.NotOpened(*self._key))
            self._state = "unbound"
            raise
        controls.note_support(engine, holds)
        is_mine = await controls.submit(store.Opened(*self._key, holds))
        self._state = "bound" if is_mine else "elsewhere"
        self.has_slid()

    def binding(self, session: Session, engine: str) -> AffinityBound | AffinityReleased | None:
        """The binding event of the turn's commit, for the engine that answered."""
        if self._state in ("closing", "released"):
            return None if session.affinity is None else AffinityReleased("closed")
        if session.affinity == Affinity(engine, self._name):
            return None
        return AffinityBound(engine, self._cause if session.affinity else "control", self._name)

    def finish(self, aborts: Collection[asyncio.Task[None]]) -> None:
        """The turn has ended in any way; `aborts` are tasks that may still abort its generation."""
        self._aborts = aborts
        if self._state in ("opening", "closing") or (self.control.action == "close" and not self._has_acquired):
            self._controls.run_in_background(self.control.session_id, self._end())
        self.over.set()
        self._controls.finished(self)

    async def aborted(self) -> None:
        """Wait until the engine has been told to abort the turn's generation, if it must be."""
        if self._aborts:
            await asyncio.wait(self._aborts)

    async def _end(self) -> None:
        """Close the name even if the turn failed before it was sent."""
        await self.aborted()
        if not self._has_acquired:
            try:
                await self._acquire("")
            except AppError as error:
                log.warning("name %s could not be closed, it will expire: %s", self.control.session_id, error)
                return
        ending = await self._controls.write_with_retry(store.End(*self._key))
        if ending is not None:
            await self._controls.close_at_engine(ending)


def _of_run(run: str, name: str) -> str:
    """What the store and the engines call a run's name. No client can spell another run's: its slash is in no name."""
    return name if run == DEFAULT_RUN else f"/{first_id(run, name)}"
