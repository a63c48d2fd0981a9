"""One schedule: processes, clients and mishaps that follow from a seed, and the judgement at its end."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import patch

import msgspec

from app.domain.events import SessionConfig
from app.errors import AppError, SessionClosed, SessionNotFound
from app.settings import Settings
from app.store.dialect import WriteConflict
from tests.tools.simulation import agreeing, budgets, checks, feed, readers, staged, themes, turns, weather
from tests.tools.simulation.bucket import URL, large_from
from tests.tools.simulation.budgets import LimitedClient, Spent, kind_of
from tests.tools.simulation.checkpoints import CheckpointDrill
from tests.tools.simulation.client import GaveUp
from tests.tools.simulation.control import CONTROL_SESSION, HOWS, ControlDrill, Wishes, rows, settled
from tests.tools.simulation.database import MemoryServer, Server
from tests.tools.simulation.departures import DEPARTURES, DepartureDrill
from tests.tools.simulation.drill import SESSION_ID, Drill, behind
from tests.tools.simulation.engine import Engines
from tests.tools.simulation.errors import expecting_no_errors
from tests.tools.simulation.finished import FINISHED, FinishingClient
from tests.tools.simulation.habits import Habits, draw_habits
from tests.tools.simulation.history import History
from tests.tools.simulation.keeper import KEPT, Keeper
from tests.tools.simulation.late import LateClient
from tests.tools.simulation.listener import Listener, listeners
from tests.tools.simulation.loop import SimulatedLoop, Stuck
from tests.tools.simulation.named import Trajectory, trajectories
from tests.tools.simulation.postgres import PostgresServer
from tests.tools.simulation.postgres_store import PostgresStore
from tests.tools.simulation.process import Process, wall
from tests.tools.simulation.spelling import Spelling
from tests.tools.simulation.staged_drill import STAGED_SESSION, StagedClient
from tests.tools.simulation.store import MemoryStore, Store
from tests.tools.simulation.sweeping import objects_left, swept
from tests.tools.simulation.tailing import Tail
from tests.tools.simulation.trainer import ADAPTERS, Trainer
from tests.tools.simulation.undone import UNDONE, UndoneDrill
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

LOOKS_EVERY = 6
"""Mishaps between two looks at what is stored in the middle of everything."""

LARGE_BYTES = 48
"""Chunks of fewer stay in the database, where object storage has the others."""

STAGED_BYTES = 20
"""Chunks of more together are written before their commit."""

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

    def __init__(self, store: Store | None = None) -> None:
        """On a store of its own in memory, unless it is given one, which it closes at the end."""
        self._store = store or MemoryStore()

    def run(self, seed: int, *, trace: bool = False) -> Outcome:
        return _Schedule(seed, self._store, trace).run()

    def close(self) -> None:
        self._store.close()


class _Schedule:
    def __init__(self, seed: int, store: Store, tracing: bool) -> None:
        self._seed = seed
        self._rng = rng = random.Random(seed)
        self._trace: list[str] = []
        self._tracing = tracing
        self._loop = loop = SimulatedLoop(rng, self._fault)
        loop.shuffled = rng.random() < 0.3
        self._history = History(loop.time)
        self._weather = weather.draw(rng)
        self._alone = rng.random() < 0.35 and isinstance(store, MemoryStore)
        store.restart(lambda: wall(loop.time()))
        self._wishes = Wishes(seed)
        settings = _settings(rng, self._wishes.engine_sessions, random.Random(f"limits {seed}"))
        self._theme = theme = themes.draw(seed)
        if theme == "streams":
            settings = staged.with_streams(settings, seed)
        is_plain = theme != "features"
        if isinstance(store, PostgresStore):
            # What processes do all the time costs round trips.
            settings = settings.model_copy(update={"lease_s": 2 * settings.lease_s})
            self._weather.be_brief()
        self._store, self._engines = store, Engines(random.Random(f"engines {seed}"), is_plain=is_plain)
        self._world = World(
            loop,
            rng,
            self._weather,
            self._history,
            store,
            theme,
            self._engines,
            Spelling(seed, is_plain=is_plain),
            settings,
            self._pick,
            self._note,
        )
        self._history.is_searched = theme != "fights"
        self._history.closes_idle = settings.idle_close_s is not None
        self._server = _server(self._world, store)
        self._tails = (
            [Tail(self._world, self._server.database("the reader", alone=False), seed)]
            if isinstance(self._server, PostgresServer)
            else []
        )
        self._poll_s = rng.choice(POLLS_S)
        self._processes: list[Process | None] = [None] * (1 if self._alone else rng.choice((2, 2, 3)))
        self._one_host = rng.random() < 0.3
        self._started: list[Process] = []
        self._mishaps = 0

    def run(self) -> Outcome:
        try:
            made = map("made-{}".format, itertools.count(1)).__next__
            with (
                expecting_no_errors(self._history),
                large_from(LARGE_BYTES),
                patch("app.turn.claims.STAGE_BYTES", STAGED_BYTES),
                patch("app.sessions.names.made_session_id", made),
            ):
                self._loop.run_until_complete(self._live())
        except Stuck as error:
            self._history.problem(str(error))
        except BaseException as error:
            error.add_note(f"in the schedule with seed {self._seed}")
            raise
        finally:
            self._server.close()
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
        keeper = Keeper(self._world, self._seed)
        if self._theme == "features" and random.Random(f"kept {self._seed}").random() < KEPT:
            changes.append(asyncio.create_task(keeper.work()))
        readings = [asyncio.create_task(one.follow()) for one in self._tails]
        storm = asyncio.create_task(self._storm())
        lives = [asyncio.create_task(one.live(config, self._rng.randint(2, 9))) for one, config in clients]
        groups = feed.draw(self._world, self._seed) if self._theme == "features" else None
        log_readers = readers.draw(self._world, self._seed) if self._theme != "streams" else None
        for one in (groups, log_readers):
            lives += [] if one is None else [asyncio.create_task(work) for work in one.lives()]
        others: list[Trajectory | Listener] = []
        if self._theme == "streams":
            others += trajectories(self._world, self._seed)
            others += listeners(self._world, self._seed)
        lives += [asyncio.create_task(one.live()) for one in others]
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
        await self._within(RECOVERY_S, keeper.rest(), "not everything that left came back, or a fork took no turn")
        await self._all_go_on(clients)
        budgets.judge(self._store, self._history)
        if groups is not None:
            await self._within(RECOVERY_S, groups.finish(), "a complete group was not given")
            groups.judge()
        if isinstance(self._server, MemoryServer):  # What the drills know is no matter of statements' order.
            await self._drill(trainer)
        if random.Random(f"departure {self._seed}").random() < DEPARTURES:
            await self._check_departures(keeper)
        for other in others:
            other.judge()
        if random.Random(f"checkpoint {self._seed}").random() < CHECKPOINTS:
            await self._check_checkpoints(clients, trainer)
        await self._within(RECOVERY_S, checks.none_open(self._store), "not every claim was let go")
        if log_readers is not None:
            await self._within(RECOVERY_S, log_readers.finish(), "a reader was not answered")
        if self._world.settings.payloads == URL:
            await self._within(RECOVERY_S, swept(self._world, self._serving), lambda: objects_left(self._world))
        await self._within(RECOVERY_S, agreeing.judge(self._world, self._seed, self._serving()), "no answer")
        for process in self._processes:
            if process is not None:
                await self._stop(process)
        for reading, reader in zip(readings, self._tails, strict=True):
            reading.cancel()
            await self._within(RECOVERY_S, reader.finish(), "a reader of all events was not done")
        await checks.judge(self._store, self._history, self._note)
        keeper.judge()
        staged.judge(self._world)
        await turns.judge(self._world)

    async def _within(self, seconds: float, work: Coroutine[Any, Any, None], late: str | Callable[[], str]) -> None:
        """`late` says what is wrong where the work is not done in time."""
        try:
            async with asyncio.timeout(seconds):
                await work
        except TimeoutError:
            self._history.problem(
                f"{late if isinstance(late, str) else late()} within {seconds:g} s after all faults had ended"
            )

    def _clients(self) -> list[tuple[LimitedClient, SessionConfig]]:
        rng = self._rng
        found = []
        # An old turn's replay payload may be gone, and its reply is given in other bytes.
        fights = self._theme == "fights" and not self._world.settings.replay
        habits = draw_habits(rng, random.Random(f"fights {self._seed}") if fights else None)
        if self._theme == "features":
            habits = msgspec.structs.replace(habits, compact=0.3)
        trees, kept = random.Random(f"trees {self._seed}"), random.Random(f"kept {self._seed}")
        limited = budgets.draw(self._seed) if self._theme == "features" else lambda config: config
        for number in range(1, rng.choice((1, 2, 3)) + 1):
            config = SessionConfig(
                rollback_window=rng.choice((0, 1, 1, 2)),
                on_divergence=rng.choice(("reject", "reject", "segment")),
                group_id=rng.choice((None, "group")),
                adapter=rng.choice((None, None, *ADAPTERS)),
                on_abort=rng.choice(("return", "continue", "continue", "fail")),
                parent=rng.choice((None, None, "s1")) if number > 1 else None,
                history=trees.choice(("linear", "tree", "tree", None)),
                matcher=self._world.spelling.draw_matcher(f"s{number}"),
                retain=kept.choice(("window", "window", "sampled", "all")),
            )
            config = limited(config)
            for rival in range(rng.choice((1, 1, 2, 3))):
                one = self._client(f"c{number}{'abc'[rival]}", f"s{number}", habits, kind_of(config))
                found.append((one, config))
        return found

    def _client(
        self, name: str, session_id: str, habits: Habits, kind: type[LimitedClient] = LimitedClient
    ) -> LimitedClient:
        return kind(self._world, name, session_id, habits, self._wishes.of)

    def _serving(self) -> list[Process]:
        return [process for process in self._processes if process is not None and process.serving]

    def _pick(self) -> Process | None:
        serving = self._serving()
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
                if self._mishaps % LOOKS_EVERY == 1:
                    checks.look(self._store, self._history)
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

    async def _all_go_on(self, clients: list[tuple[LimitedClient, SessionConfig]]) -> None:
        """Nothing fails any more: each session that was not ended takes a turn, within a bounded time."""
        for session_id in dict.fromkeys(one.session_id for one, _ in clients):
            config = next(config for one, config in clients if one.session_id == session_id)
            last = self._client(f"last-{session_id}", session_id, Habits(), kind_of(config))
            await self._within(RECOVERY_S, self._go_on(last, config), f"{session_id} took no turn")

    async def _go_on(self, last: LimitedClient, config: SessionConfig) -> None:
        while True:
            try:
                await last.join(config)
                await (last.spend() if budgets.ends(config) else last.turn())
                return
            except Spent:
                noted = budgets.is_noted(self._store, last.session_id)
                self._world.must(noted, f"{last.session_id} has reached a limit, and the log does not know")
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
        await self._unless_idle(2 * RECOVERY_S, drill.run(RECOVERY_S), "the drill was not over")
        asker = self._client("control", CONTROL_SESSION, Habits())
        names = ControlDrill(self._world, asker, self._rng.choice(HOWS), self._kill_again)
        await self._unless_idle(RECOVERY_S, names.run(), self._names_left)
        late = LateClient(self._world, "late", "late", Habits())
        await self._unless_idle(RECOVERY_S, late.drill(), "the drill of late attempts was not over")
        if self._world.settings.upstream_dialect == "vllm":
            outliving = StagedClient(self._kill_again, self._seed, self._world, "staged", STAGED_SESSION, Habits())
            await self._unless_idle(2 * RECOVERY_S, outliving.drill(), "the drill of staged tokens was not over")
            await self._keep_all()
        if random.Random(f"has finished {self._seed}").random() < FINISHED:
            finishing = FinishingClient(self._world, "finished", "finished", Habits(loyalty=1.0))
            await self._unless_idle(RECOVERY_S, finishing.drill(), "the drill of a finish was not over")
        if not self._alone and random.Random(f"has undone {self._seed}").random() < UNDONE:
            assert isinstance(self._server, MemoryServer)
            undone = UndoneDrill(self._world, self._server, self._seed, self._serving)
            await self._unless_idle(2 * RECOVERY_S, undone.run(), "the drill of claims that were undone was not over")
        await self._all_agree()

    async def _check_checkpoints(self, clients: list[tuple[LimitedClient, SessionConfig]], trainer: Trainer) -> None:
        users = [
            self._client(f"user-{session_id}", session_id, Habits(), kind_of(config))
            for session_id, config in {one.session_id: config for one, config in clients}.items()
        ]
        drill = CheckpointDrill(self._world, self._seed, users, trainer, self._kill_again)
        await self._within(2 * RECOVERY_S, drill.run(), "the drill of checkpoints was not over")
        await self._keep_all()
        await self._all_agree()

    async def _check_departures(self, keeper: Keeper) -> None:
        drill = DepartureDrill(self._world, self._seed, keeper, self._kill_again)
        await self._within(2 * RECOVERY_S, drill.run(), "the drill of departures was not over")
        await self._keep_all()

    def _names_left(self) -> str:
        return f"names were not ended: {rows(self._store)}"

    async def _unless_idle(
        self, seconds: float, work: Coroutine[Any, Any, None], late: str | Callable[[], str]
    ) -> None:
        """A process that is still frozen may keep a drill waiting for longer than a session may be idle."""
        try:
            await self._within(seconds, work, late)
        except (SessionClosed, SessionNotFound) as error:
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


def _server(world: World, store: Store) -> Server:
    if isinstance(store, MemoryStore):
        return MemoryServer(world, store)
    assert isinstance(store, PostgresStore)
    return PostgresServer(world, store)


def _settings(rng: random.Random, engine_sessions: tuple[str, ...], limits: random.Random) -> Settings:
    """Whatever the environment says."""
    return Settings.model_construct(
        upstreams=("http://engine-1", "http://engine-2")[: rng.choice((1, 2))],
        engine_sessions=engine_sessions,
        lease_s=rng.choice((1.0, 2.0, 8.0)),
        replay=rng.choice(((), ("routed_experts",))),
        inline_max_bytes=rng.choice((0, 65536)),
        cache_bytes=rng.choice((0, 1 << 20, 1 << 20)),
        idle_close_s=rng.choice((None,) * 5 + (8.0,)),
        max_open_turns=limits.choice((2, 64, 64)),
        max_replay_bytes=limits.choice((256, 1 << 30, 1 << 30)),
        replay_incremental=limits.random() < 0.3,
        payloads=limits.choice(("database", "database", "database", URL)),
        payloads_keep_s=limits.choice((0.0, 5.0)),
        closed_replay_ttl_s=rng.choice((86400.0,) * 5 + (8.0,)),
        client_reply="verbatim",  # What a client was told is compared with the log.
    )
