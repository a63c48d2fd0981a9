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
from tests.tools.simulation import agreeing, budgets, checks, feed, quiet, readers, staged, turns
from tests.tools.simulation.bucket import URL, large_from
from tests.tools.simulation.budgets import LimitedClient, Spent, kind_of
from tests.tools.simulation.checkpoints import CheckpointDrill
from tests.tools.simulation.client import GaveUp
from tests.tools.simulation.conditions import Habits, draw_habits, draw_theme, draw_weather
from tests.tools.simulation.control import CONTROL_SESSION, HOWS, ControlDrill, Wishes, cut_off, rows, settled
from tests.tools.simulation.database import MemoryServer, Server
from tests.tools.simulation.departures import DEPARTURES, DepartureDrill
from tests.tools.simulation.drill import SESSION_ID, Drill
from tests.tools.simulation.engine import Engines
from tests.tools.simulation.finished import FINISHED, FinishingClient
from tests.tools.simulation.history import History, expecting_no_errors
from tests.tools.simulation.keeper import KEPT, Keeper
from tests.tools.simulation.late import LateClient
from tests.tools.simulation.let_go import LET_GO, LetGoClient
from tests.tools.simulation.listener import Listener, listeners
from tests.tools.simulation.loop import SimulatedLoop, Stuck
from tests.tools.simulation.named import Trajectory, trajectories
from tests.tools.simulation.postgres import PostgresServer
from tests.tools.simulation.postgres_store import PostgresStore
from tests.tools.simulation.process import wall
from tests.tools.simulation.repeats import REPEATS, RepeatingClient
from tests.tools.simulation.spelling import Spelling
from tests.tools.simulation.staged_drill import STAGED_SESSION, StagedClient
from tests.tools.simulation.store import MemoryStore, Store
from tests.tools.simulation.supervisor import Supervisor
from tests.tools.simulation.sweeping import objects_left, swept
from tests.tools.simulation.tailing import Tail
from tests.tools.simulation.trainer import ADAPTERS, Trainer
from tests.tools.simulation.undone import UNDONE, UndoneDrill
from tests.tools.simulation.world import World

CHECKPOINTS = 0.3
"""How many schedules end with a drill of checkpoints: it costs as much as all else."""

PATIENCE_S = 1200.0
"""How long clients may take for what they want to do, all faults included."""

RECOVERY_S = 120.0
"""How long a turn may take in each session once nothing fails any more."""

RUSHES = 6.0
"""How often clients take part in a rush, beside ten turns."""

LARGE_BYTES = 48
"""Chunks of fewer stay in the database, where object storage has the others."""

BRIEF_POLL_S = 1.0
"""Processes look no more often at the fleet's log on PostgreSQL, where looks would be half of all round trips."""

STAGED_BYTES = 20
"""Chunks of more together are written before their commit."""


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
        self._weather = draw_weather(rng)
        alone = rng.random() < 0.35 and isinstance(store, MemoryStore)
        store.restart(lambda: wall(loop.time()))
        self._wishes = Wishes(seed)
        settings = _settings(rng, self._wishes.engine_sessions, random.Random(f"limits {seed}"))
        self._theme = theme = draw_theme(seed)
        if theme == "streams":
            settings = staged.with_streams(settings, seed)
        self._quiet = quiet.draw(seed, theme) if isinstance(store, MemoryStore) else None
        settings = quiet.with_needs(settings, self._quiet)
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
            lambda: self._supervisor.pick(),
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
        least_poll_s = BRIEF_POLL_S if isinstance(store, PostgresStore) else 0.0
        self._supervisor = Supervisor(self._world, self._server, alone=alone, least_poll_s=least_poll_s)

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
            self._supervisor.mishaps,
            self._loop.time(),
            history.searched,
            history.unsearched,
        )

    async def _live(self) -> None:
        """Things fail; then nothing does, and all comes to its end; drills; and the judgement."""
        supervisor, theme = self._supervisor, self._theme
        await supervisor.keep_all()
        clients = self._clients()
        trainer = Trainer(self._world)
        keeper = Keeper(self._world, self._seed)
        feeds = feed.draw(self._world, self._seed) if theme == "features" else []
        log_readers = readers.draw(self._world, self._seed) if theme != "streams" else []
        callers: list[Trajectory | Listener] = []
        if theme == "streams":
            callers = [*trajectories(self._world, self._seed), *listeners(self._world, self._seed)]

        works = [work() for work in (trainer.train, trainer.operate) if self._rng.random() < 0.4]
        if theme == "features" and random.Random(f"kept {self._seed}").random() < KEPT:
            works.append(keeper.work())
        changes = [asyncio.create_task(work) for work in works]
        followings = [asyncio.create_task(one.follow()) for one in self._tails]
        changes.append(asyncio.create_task(supervisor.storm()))
        lives = [asyncio.create_task(one.live(config, self._rng.randint(2, 9))) for one, config in clients]
        lives += [asyncio.create_task(work) for groups in feeds for work in groups.lives()]
        lives += [asyncio.create_task(work) for reader in log_readers for work in reader.lives()]
        lives += [asyncio.create_task(caller.live()) for caller in callers]
        await self._all_done(lives)
        self._weather.calm()
        self._note("calm")
        await asyncio.gather(*changes)

        await supervisor.keep_all()
        await self._within(RECOVERY_S, trainer.put_back(), "engines could not be put back")
        await self._within(RECOVERY_S, settled(self._store), self._names_left)
        await self._within(RECOVERY_S, keeper.rest(), "not everything that left came back, or a fork took no turn")
        await self._all_go_on(clients)
        for groups in feeds:
            await self._within(RECOVERY_S, groups.finish(), "a complete group was not given")
            groups.judge()

        if isinstance(self._server, MemoryServer):  # What the drills know is no matter of statements' order.
            await self._drill(trainer, keeper)
        budgets.judge(self._store, self._history)
        if random.Random(f"departure {self._seed}").random() < DEPARTURES:
            await self._check_departures(keeper)
        for caller in callers:
            caller.judge()
        if random.Random(f"checkpoint {self._seed}").random() < CHECKPOINTS:
            await self._check_checkpoints(clients, trainer)

        await self._within(RECOVERY_S, checks.none_open(self._store), "not every claim was let go")
        for reader in log_readers:
            await self._within(RECOVERY_S, reader.finish(), "a reader was not answered")
        if self._world.settings.payloads == URL:
            await self._within(RECOVERY_S, swept(self._world, supervisor.serving), lambda: objects_left(self._world))
        await self._within(RECOVERY_S, agreeing.judge(self._world, self._seed, supervisor.serving()), "no answer")
        await self._within(RECOVERY_S, cut_off(self._world, supervisor.serving()), self._names_left)
        await supervisor.stop_all()
        for following, tail in zip(followings, self._tails, strict=True):
            following.cancel()
            await self._within(RECOVERY_S, tail.finish(), "a reader of all events was not done")
        await checks.judge(self._store, self._history, self._note)
        keeper.judge()
        staged.judge(self._world)
        await turns.judge(self._world)

    async def _all_done(self, lives: list[asyncio.Task[None]]) -> None:
        """Whoever is not done in time, or met an error that is no answer, is a problem."""
        _, late = await asyncio.wait(lives, timeout=PATIENCE_S)
        if late:
            self._history.problem(f"{len(late)} clients were not done after {PATIENCE_S:g} s")
        for life in lives:
            if life not in late and not life.cancelled() and life.exception() is not None:
                self._history.problem(f"a client met {life.exception()!r}")

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
        if self._theme == "fights" and isinstance(self._store, PostgresStore):
            # In memory no statement comes between two others.
            habits = msgspec.structs.replace(habits, rush=RUSHES)
        trees, retained = random.Random(f"trees {self._seed}"), random.Random(f"retained {self._seed}")
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
                retain=retained.choice(("window", "window", "sampled", "all")),
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

    async def _drill(self, trainer: Trainer, keeper: Keeper) -> None:
        kill = self._supervisor.kill_again
        await self._supervisor.all_agree()
        name = self._rng.choice((*ADAPTERS, None))
        drill = Drill(self._world, self._client("drill", SESSION_ID, Habits()), name, trainer)
        await self._unless_idle(2 * RECOVERY_S, drill.run(RECOVERY_S), "the drill was not over")
        asker = self._client("control", CONTROL_SESSION, Habits())
        names = ControlDrill(self._world, asker, self._rng.choice(HOWS), kill)
        await self._unless_idle(RECOVERY_S, names.run(), self._names_left)
        late = LateClient(self._world, "late", "late", Habits())
        await self._unless_idle(RECOVERY_S, late.drill(), "the drill of late attempts was not over")
        if self._world.settings.upstream_dialect == "vllm":
            outliving = StagedClient(
                self._supervisor.kill_again, self._seed, self._world, "staged", STAGED_SESSION, Habits()
            )
            await self._unless_idle(2 * RECOVERY_S, outliving.drill(), "the drill of staged tokens was not over")
            await self._supervisor.keep_all()
        if random.Random(f"has finished {self._seed}").random() < FINISHED:
            finishing = FinishingClient(self._world, "finished", "finished", Habits(loyalty=1.0))
            await self._unless_idle(RECOVERY_S, finishing.drill(), "the drill of a finish was not over")
        assert isinstance(self._server, MemoryServer)
        if random.Random(f"has let go {self._seed}").random() < LET_GO:
            refused = LetGoClient(self._server, self._seed, self._world, "let-go", "let-go", Habits(loyalty=1.0))
            await self._unless_idle(RECOVERY_S, refused.drill(), "the drill of claims that are let go was not over")
        if random.Random(f"has repeats {self._seed}").random() < REPEATS:
            repeating = RepeatingClient(
                self._server, kill, self._seed, self._world, "repeats", "repeats", Habits(loyalty=1.0)
            )
            await self._unless_idle(RECOVERY_S, repeating.drill(), "the drill of repeated requests was not over")
            await self._supervisor.keep_all()
        if not self._supervisor.is_alone and random.Random(f"has undone {self._seed}").random() < UNDONE:
            undone = UndoneDrill(self._world, self._server, self._seed, self._supervisor.serving)
            await self._unless_idle(2 * RECOVERY_S, undone.run(), "the drill of claims that were undone was not over")
        if self._quiet is not None:
            work = quiet.drill(self._quiet, self._world, keeper)
            await self._unless_idle(RECOVERY_S, work, f"the drill of {self._quiet.__name__} was not over")
        await self._supervisor.all_agree()

    async def _check_checkpoints(self, clients: list[tuple[LimitedClient, SessionConfig]], trainer: Trainer) -> None:
        users = [
            self._client(f"user-{session_id}", session_id, Habits(), kind_of(config))
            for session_id, config in {one.session_id: config for one, config in clients}.items()
        ]
        drill = CheckpointDrill(self._world, self._seed, users, trainer, self._supervisor.kill_again)
        await self._within(2 * RECOVERY_S, drill.run(), "the drill of checkpoints was not over")
        await self._supervisor.keep_all()
        await self._supervisor.all_agree()

    async def _check_departures(self, keeper: Keeper) -> None:
        drill = DepartureDrill(self._world, self._seed, keeper, self._supervisor.kill_again)
        await self._within(2 * RECOVERY_S, drill.run(), "the drill of departures was not over")
        await self._supervisor.keep_all()

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
        finally:
            self._weather.calm()  # A drill may have ended in the middle of its own.

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
