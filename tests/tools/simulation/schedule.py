"""One schedule: processes, clients and mishaps that follow from a seed, and the judgement at its end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from app.domain.events import SessionConfig
from app.errors import AppError, SessionClosed, SessionNotFound
from app.settings import Settings
from app.store.dialect import WriteConflict
from tests.tools.simulation import checks, weather
from tests.tools.simulation.checkpoints import CheckpointDrill
from tests.tools.simulation.client import Client, GaveUp
from tests.tools.simulation.control import CONTROL_SESSION, HOWS, ControlDrill, Wishes, rows, settled
from tests.tools.simulation.database import Server
from tests.tools.simulation.drill import SESSION_ID, Drill, behind
from tests.tools.simulation.engine import Engines
from tests.tools.simulation.habits import Habits, draw_habits
from tests.tools.simulation.history import History
from tests.tools.simulation.late import LateClient
from tests.tools.simulation.loop import SimulatedLoop, Stuck
from tests.tools.simulation.process import Process, wall
from tests.tools.simulation.store import MemoryStore
from tests.tools.simulation.trainer import ADAPTERS, Trainer
from tests.tools.simulation.tree_client import TreeClient
from tests.tools.simulation.world import World

HOUR_S = 3600.0

STORM_S = 40.0
"""How long things go wrong at most; clients are mostly done before."""

CHECKPOINTS = 0.3
"""How many schedules end with a drill of checkpoints: it costs as much as all else."""

PATIENCE_S = 1200.0
"""How long clients may take for what they want to do, all faults included."""

RECOVERY_S = 120.0
"""How long a turn may take in each session once nothing fails any more."""

POLLS_S = (0.05, 1.0, 1.0, 1.0, 2.0, 2.0)
"""How often processes look at the fleet's log. Each look costs as much as ever, so most schedules have few."""


class Outcome(msgspec.Struct, frozen=True):
    """`problems` is empty where every promise was kept; `trace` is what happened, if that was asked for. `searched`
    sessions' calls have an order; those of `unsearched` ones may have none."""

    seed: int
    problems: list[str]
    trace: list[str]
    turns: int
    mishaps: int
    seconds: float
    searched: int
    unsearched: int


class Simulation:
    """Runs one schedule after the other on one store."""

    def __init__(self) -> None:
        self._store = MemoryStore()

    def run(self, seed: int, *, trace: bool = False) -> Outcome:
        return _Schedule(seed, self._store, trace).run()

    def close(self) -> None:
        self._store.close()


class _Schedule:
    def __init__(self, seed: int, store: MemoryStore, tracing: bool) -> None:
        self._seed = seed
        self._rng = rng = random.Random(seed)
        self._trace: list[str] = []
        self._tracing = tracing
        self._loop = loop = SimulatedLoop(rng, self._fault)
        loop.shuffled = rng.random() < 0.3
        self._history = History(loop.time)
        self._weather = weather.draw(rng)
        self._alone = rng.random() < 0.35
        store.restart(lambda: wall(loop.time()))
        self._wishes = Wishes(seed)
        settings = _settings(rng, self._wishes.engine_sessions, random.Random(f"limits {seed}"))
        self._store, self._engines = store, Engines()
        self._world = World(
            loop, rng, self._weather, self._history, store, self._engines, settings, self._pick, self._note
        )
        self._history.closes_idle = settings.idle_close_s is not None
        self._server = Server(self._world)
        self._poll_s = rng.choice(POLLS_S)
        self._processes: list[Process | None] = [None] * (1 if self._alone else rng.choice((2, 2, 3)))
        self._one_host = rng.random() < 0.3
        self._started: list[Process] = []
        self._mishaps = 0

    def run(self) -> Outcome:
        logs = _Errors(self._history)
        logger = logging.getLogger("turnlog")
        logger.addHandler(logs)
        propagated, logger.propagate = logger.propagate, False
        try:
            self._loop.run_until_complete(self._live())
        except Stuck as error:
            self._history.problem(str(error))
        except BaseException as error:
            error.add_note(f"in the schedule with seed {self._seed}")
            raise
        finally:
            logger.removeHandler(logs)
            logger.propagate = propagated
        history = self._history
        return Outcome(
            self._seed,
            history.problems,
            self._trace,
            len(history.turns),
            self._mishaps,
            self._loop.time(),
            history.searched,
            history.unsearched,
        )

    async def _live(self) -> None:
        await self._keep_all()
        clients = self._clients()
        trainer = Trainer(self._world)
        changes = [asyncio.create_task(work()) for work in (trainer.train, trainer.operate) if self._rng.random() < 0.4]
        storm = asyncio.create_task(self._storm())
        lives = [asyncio.create_task(one.live(config, self._rng.randint(2, 9))) for one, config in clients]
        _, late = await asyncio.wait(lives, timeout=PATIENCE_S)
        if late:
            self._history.problem(f"{len(late)} clients were not done after {PATIENCE_S:g} s")
        self._weather.calm()
        self._note("calm")
        await asyncio.gather(storm, *changes)
        for life in lives:
            if life.done() and not life.cancelled() and life.exception() is not None:
                self._history.problem(f"a client met {life.exception()!r}")
        await self._keep_all()
        await self._within(RECOVERY_S, trainer.put_back(), "engines could not be put back")
        await self._within(RECOVERY_S, settled(self._store), self._names_left)
        await self._all_go_on(clients)
        await self._drill(trainer)
        if random.Random(f"checkpoint {self._seed}").random() < CHECKPOINTS:
            await self._check_checkpoints(clients, trainer)
        await self._within(RECOVERY_S, checks.none_open(self._store), "not every claim was let go")
        for process in self._processes:
            if process is not None:
                await self._stop(process)
        await checks.judge(self._store, self._history, self._note)

    async def _within(self, seconds: float, work: Coroutine[Any, Any, None], late: str | Callable[[], str]) -> None:
        """`late` says what is wrong where the work is not done in time."""
        try:
            async with asyncio.timeout(seconds):
                await work
        except TimeoutError:
            self._history.problem(
                f"{late if isinstance(late, str) else late()} within {seconds:g} s after all faults had ended"
            )

    def _clients(self) -> list[tuple[Client, SessionConfig]]:
        rng = self._rng
        found = []
        # An old turn's replay payload may be gone, and its reply is given in other bytes.
        habits = draw_habits(rng, None if self._world.settings.replay else random.Random(f"fights {self._seed}"))
        trees = random.Random(f"trees {self._seed}")
        for number in range(1, rng.choice((1, 2, 3)) + 1):
            config = SessionConfig(
                rollback_window=rng.choice((0, 1, 1, 2)),
                on_divergence=rng.choice(("reject", "reject", "segment")),
                group_id=rng.choice((None, "group")),
                adapter=rng.choice((None, None, *ADAPTERS)),
                on_abort=rng.choice(("return", "continue", "continue", "fail")),
                parent=rng.choice((None, None, "s1")) if number > 1 else None,
                history=trees.choice(("linear", "tree", "tree", None)),
            )
            for rival in range(rng.choice((1, 1, 2, 3))):
                one = self._client(f"c{number}{'abc'[rival]}", f"s{number}", habits, _kind(config))
                found.append((one, config))
        return found

    def _client(self, name: str, session_id: str, habits: Habits, kind: type[Client] = Client) -> Client:
        return kind(self._world, name, session_id, habits, self._wishes.of)

    def _pick(self) -> Process | None:
        serving = [process for process in self._processes if process is not None and process.serving]
        return self._rng.choice(serving) if serving else None

    async def _keep_all(self) -> None:
        for place, process in enumerate(self._processes):
            if process is None:
                await self._start(place)

    async def _start(self, place: int) -> None:
        """As a supervisor does: again, until it runs."""
        while True:
            name = f"p{len(self._started) + 1}"
            process = Process(name, self._world, self._server, self._poll_s, alone=self._alone, is_gone=self._is_gone)
            self._started.append(process)
            self._processes[place] = process
            try:
                await process.spawn(process.start())
                return
            except (AppError, WriteConflict) as error:
                self._note(f"{process.name} could not start: {error}")
                process.kill()
            await asyncio.sleep(0.5)

    async def _storm(self) -> None:
        """Each schedule has some kinds of mishaps only: all of them together hide what one does."""
        rng = self._rng
        kinds: list[Any] = [self._kill, self._freeze, self._jump, self._lose_store, self._outage, self._restart]
        mishaps = rng.sample(kinds, rng.randint(0, len(kinds)))
        if not mishaps:
            return
        while self._weather.is_bad and self._loop.time() < STORM_S:
            await asyncio.sleep(rng.expovariate(1 / self._weather.mishap_s))
            place = rng.randrange(len(self._processes))
            process = self._processes[place]
            if process is not None and process.serving:
                self._mishaps += 1
                await rng.choice(mishaps)(place, process)

    async def _kill(self, place: int, process: Process) -> None:
        self._note(f"{process.name} is killed")
        process.kill()
        await self._replace(place)

    async def _kill_again(self, process: Process) -> None:
        await self._kill(self._processes.index(process), process)

    async def _replace(self, place: int) -> None:
        self._processes[place] = None
        await asyncio.sleep(self._rng.choice((0.05, 2.0, 15.0)) * self._rng.random())
        await self._start(place)

    async def _restart(self, place: int, process: Process) -> None:
        self._note(f"{process.name} is stopped")
        await self._stop(process)
        await self._replace(place)

    async def _stop(self, process: Process) -> None:
        stopping = process.spawn(process.stop())
        await asyncio.wait({stopping}, timeout=PATIENCE_S)
        if not stopping.done():
            self._history.problem(f"{process.name} did not stop")
        elif stopping.exception() is not None and not isinstance(stopping.exception(), (AppError, WriteConflict)):
            self._history.problem(f"{process.name} stopped with {stopping.exception()!r}")
        process.kill()

    async def _freeze(self, place: int, process: Process) -> None:
        seconds = self._rng.choice((0.5, 3.0, 20.0)) * self._rng.random()
        self._note(f"{process.name} is frozen for {seconds:.3f} s")
        process.owner.frozen_until = self._loop.time() + seconds

    async def _jump(self, place: int, process: Process) -> None:
        process.clock_offset_s += self._rng.choice((-HOUR_S, -1.0, 1.0, HOUR_S)) * self._rng.random()
        self._note(f"the clock of {process.name} is off by {process.clock_offset_s:.3f} s")

    async def _lose_store(self, place: int, process: Process) -> None:
        """A power cut; where the process has the store to itself it is on the same machine."""
        if self._alone:
            process.kill()
        self._history.crashes.append(self._loop.time())
        lost = self._server.crash(self._rng.random() * self._weather.down_s)
        self._note(f"the database crashes, {lost} transactions are gone")
        if self._alone:
            await self._replace(place)

    async def _outage(self, place: int, process: Process) -> None:
        seconds = self._rng.random() * self._weather.down_s
        self._note(f"the database cannot be reached for {seconds:.3f} s")
        self._server.down_until = self._loop.time() + seconds

    async def _all_go_on(self, clients: list[tuple[Client, SessionConfig]]) -> None:
        """Nothing fails any more: each session that was not ended takes a turn, within a bounded time."""
        for session_id in dict.fromkeys(one.session_id for one, _ in clients):
            config = next(config for one, config in clients if one.session_id == session_id)
            last = self._client(f"last-{session_id}", session_id, Habits(), _kind(config))
            await self._within(RECOVERY_S, self._go_on(last, config), f"{session_id} took no turn")

    async def _go_on(self, last: Client, config: SessionConfig) -> None:
        while True:
            try:
                await last.join(config)
                await last.turn()
                return
            except (SessionClosed, SessionNotFound) as error:
                # Where its root is ended, a session is closed, or cannot be created.
                names = [name for name in (last.session_id, config.parent) if name is not None]
                told = [name for name in names if self._history.ended(name) is not None]
                if not told and not any(checks.is_ended(self._store, name) for name in names):
                    self._history.problem(f"nobody has ended {last.session_id}, and yet: {error}")
                return
            except GaveUp:
                await asyncio.sleep(1.0)

    async def _drill(self, trainer: Trainer) -> None:
        await self._all_agree()
        name = self._rng.choice((*ADAPTERS, None))
        drill = Drill(self._world, self._client("drill", SESSION_ID, Habits()), name, trainer)
        try:
            await self._within(2 * RECOVERY_S, drill.run(RECOVERY_S), "the drill was not over")
        except (SessionClosed, SessionNotFound) as error:
            self._was_idle(error)
        asker = self._client("control", CONTROL_SESSION, Habits())
        names = ControlDrill(self._world, asker, self._rng.choice(HOWS), self._kill_again)
        try:
            await self._within(RECOVERY_S, names.run(), self._names_left)
        except (SessionClosed, SessionNotFound) as error:
            self._was_idle(error)
        late = LateClient(self._world, "late", "late", Habits())
        try:
            await self._within(RECOVERY_S, late.drill(), "the drill of late attempts was not over")
        except (SessionClosed, SessionNotFound) as error:
            self._was_idle(error)
        await self._all_agree()

    async def _check_checkpoints(self, clients: list[tuple[Client, SessionConfig]], trainer: Trainer) -> None:
        users = [
            self._client(f"user-{session_id}", session_id, Habits(), _kind(config))
            for session_id, config in {one.session_id: config for one, config in clients}.items()
        ]
        drill = CheckpointDrill(self._world, self._seed, users, trainer, self._kill_again)
        await self._within(2 * RECOVERY_S, drill.run(), "the drill of checkpoints was not over")
        await self._keep_all()
        await self._all_agree()

    def _names_left(self) -> str:
        return f"names were not ended: {rows(self._store)}"

    def _was_idle(self, error: AppError) -> None:
        """A process that is still frozen may keep a drill waiting for longer than a session may be idle."""
        if self._world.settings.idle_close_s is None:
            self._history.problem(f"nobody has ended the drill's session, and yet: {error}")

    async def _all_agree(self) -> None:
        """Every process learns what the fleet's log says, though one may still wait for an answer from the storm."""
        processes = [process for process in self._processes if process is not None]
        deadline = self._loop.time() + RECOVERY_S
        while late := behind(self._store, processes):
            await asyncio.sleep(self._poll_s)
            if self._loop.time() > deadline:
                self._history.problem(f"{late} did not learn within {RECOVERY_S:g} s what the fleet's log says")
                return

    def _is_gone(self, incarnation: int) -> bool:
        """Can the others of its host tell that the process is gone?"""
        return self._one_host and any(one.is_over for one in self._started if one.incarnation == incarnation)

    def _note(self, what: str) -> None:
        if self._tracing:
            self._trace.append(f"{self._loop.time():12.6f} {what}")

    def _fault(self, message: str, error: BaseException | None) -> None:
        if not isinstance(error, (AppError, asyncio.CancelledError)):
            self._history.problem(f"{message}: {error!r}")


class _Errors(logging.Handler):
    """What the service logs as an error is a fault that nobody expected."""

    def __init__(self, history: History) -> None:
        super().__init__(logging.ERROR)
        self._history = history

    def emit(self, record: logging.LogRecord) -> None:
        fault = "" if record.exc_info is None else f": {record.exc_info[1]!r}"
        self._history.problem(f"the log has an error: {record.getMessage()}{fault}")


def _kind(config: SessionConfig) -> type[Client]:
    return Client if config.history == "linear" else TreeClient


def _settings(rng: random.Random, engine_sessions: tuple[str, ...], limits: random.Random) -> Settings:
    """Whatever the environment says."""
    return Settings.model_construct(
        upstreams=("http://engine-1", "http://engine-2")[: rng.choice((1, 2))],
        engine_sessions=engine_sessions,
        lease_s=rng.choice((1.0, 2.0, 8.0)),
        replay=rng.choice(((), (), ("routed_experts",))),
        inline_max_bytes=rng.choice((0, 65536)),
        cache_bytes=rng.choice((0, 1 << 20, 1 << 20)),
        idle_close_s=rng.choice((None,) * 5 + (8.0,)),
        max_open_turns=limits.choice((2, 64, 64)),
        max_replay_bytes=limits.choice((256, 1 << 30, 1 << 30)),
        closed_replay_ttl_s=rng.choice((86400.0,) * 5 + (8.0,)),
        client_reply="verbatim",  # What a client was told is compared with the log.
    )
