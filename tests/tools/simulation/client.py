"""A client of one session: takes turns, insists, gives up, goes back, and sometimes ends it all; and one of a tree of
turns, several at once."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from app.domain.events import History, SessionConfig
from app.errors import (
    AppError,
    HistoryMismatch,
    InvalidRequest,
    RollbackTooDeep,
    SessionClosed,
    SessionExists,
    SessionNotFound,
)
from app.sessions.lifecycle import NewSession
from app.turn.in_flight import InFlightTurn, Stages, TurnReply, Waiter, hash_key
from tests.tools.simulation import calls, recorded
from tests.tools.simulation.calls import Chat, Close, Create, Erase, Look, Numbers, Reward
from tests.tools.simulation.conditions import Habits
from tests.tools.simulation.engine import digest
from tests.tools.simulation.history import Acknowledged, Fact, Site
from tests.tools.simulation.process import Disconnected, Process, Reset
from tests.tools.simulation.service import snapshot
from tests.tools.simulation.spelling import Message, results, spoken
from tests.tools.simulation.world import World

T = TypeVar("T")


class Wire:
    """`came_at`: the request lay there to be read; `begun_at`: the process began with it; `over_at`: its client had its
    answer or gave up. A proxy keeps the connection when its client has given up."""

    def __init__(self, now: Callable[[], float], process: str, *, is_proxied: bool) -> None:
        self._now = now
        self.process = process
        self.is_proxied = is_proxied
        self.came_at = self.begun_at = self.over_at = math.inf

    def come(self) -> None:
        self.came_at = self._now()

    def begin(self) -> None:
        self.begun_at = self._now()

    def end(self) -> None:
        self.over_at = self._now()

    def is_gone(self) -> bool:
        return self.over_at < math.inf and not self.is_proxied

    def data_age_s(self) -> float:
        return self._now() - self.came_at


TRIES = 6

RUSH_S = 3.0
"""Between the moments at which many clients act."""


class GaveUp(Exception):
    """The client does not know whether what it wanted has happened."""


class Client:
    """The name tells clients of one session apart. `history` is what a session gets whose first turn decides that.

    `wishes` say of a session's turn what session control it asks for, if not every one for the same `control`.
    """

    history: History = "linear"

    def __init__(
        self,
        world: World,
        name: str,
        session_id: str,
        habits: Habits,
        wishes: Callable[[str, str], Mapping[str, Any] | None] = lambda session_id, logical: None,
    ) -> None:
        self.name = name
        self.session_id = session_id
        self.messages: list[Message] = []
        self.control: Mapping[str, Any] | None = None
        self.refused: AppError | Disconnected | None = None
        self._world = world
        self._wishes = wishes
        self._habits = habits
        self._rng = world.rng
        self._history = world.history
        self._note = world.note
        self._asked = 0
        self._sticky: Process | None = None
        self._wires: dict[str, list[Wire]] = {}

    async def live(self, config: SessionConfig, steps: int) -> None:
        """Create the session, unless another client has, and use it until it ends or `steps` are done."""
        try:
            await self.insist(lambda: self._create(config), TRIES)
            for _ in range(steps):
                await asyncio.sleep(self._rng.expovariate(2.0))
                await self._step(config)
        except (SessionClosed, SessionNotFound, SessionExists) as error:
            self._note(f"{self.name}: {error}")
        except GaveUp:
            self._note(f"{self.name} gave up")

    async def join(self, config: SessionConfig) -> None:
        """Be sure that the session is there, and take over its history. Raises SessionClosed, GaveUp."""
        with contextlib.suppress(SessionExists):
            await self.insist(lambda: self._create(config), TRIES)
        await self._resync()

    async def _step(self, config: SessionConfig) -> None:
        habits = self._habits
        kinds = list(STEPS)
        (kind,) = self._rng.choices(kinds, [getattr(habits, name) for name in kinds])
        try:
            await STEPS[kind](self, config)
        except GaveUp:
            self._note(f"{self.name} does not know")

    @property
    def asked(self) -> Process | None:
        """The process that was asked last, if it still serves."""
        return self._sticky if self._sticky is not None and self._sticky.serving else None

    def go_to(self, process: Process) -> None:
        """Ask it, for as long as the client is loyal."""
        self._sticky = process

    async def close(self) -> None:
        """Raises SessionNotFound, and GaveUp."""
        with contextlib.suppress(SessionClosed):
            await self.insist(self._close, TRIES)

    async def turn(self, tries: int = TRIES) -> None:
        """One more turn. Raises SessionClosed, SessionNotFound, and GaveUp."""
        self.messages = await self.turn_after(self.messages, tries=tries)

    async def turn_after(
        self, before: list[Message], said: str | None = None, agent: str | None = None, tries: int = TRIES
    ) -> list[Message]:
        """One more turn after these messages, which says what was `said` before, or something new; all messages then.

        Raises as `turn`.
        """
        self._asked += 1
        new = f"{self.name}.{self._asked}"
        logical = said or new
        how = self._rng.random()
        key = new if how < self._world.weather.keyed else None
        marks = how < 0.9
        cut_after: int | None = None
        for tried in range(tries):
            messages = [*before, *results(before), {"role": "user", "content": logical}]
            turn = self._turn(key, agent, retry_count=tried if marks and key is None else 0)
            try:
                reply = await self._ask(lambda: self._take(messages, logical, key, turn))  # noqa: B023
            except (HistoryMismatch, RollbackTooDeep):
                # What this client believes is not what is there: another one, or an attempt that came late.
                await self._resync()
                before = self.messages
                self._asked += 1
                logical, key, cut_after = f"{self.name}.{self._asked}", None, None
                continue
            except (SessionClosed, SessionNotFound, InvalidRequest):
                raise
            except (AppError, Disconnected, TimeoutError) as error:
                self._note(f"{self.name}: {logical} failed: {type(error).__name__} {error}")
                is_cut = isinstance(error, Reset) and error.reply.turn is not None
                cut_after = self._answers(logical) if is_cut else None
                if self._rng.random() < self._habits.gives_up:
                    break
                if not marks and self.history == "linear":
                    self._asked += 1
                    logical = f"{self.name}.{self._asked}"
                await asyncio.sleep(0.2 * 2**tried * self._rng.random())
                continue
            if turn.is_retry and said is None and self.history == "tree" and not reply.replayed:
                # An attempt that a proxy has kept may have got the reply meanwhile.
                was_owed = cut_after is not None and self._answers(logical) == cut_after + 1
                self._world.must(not was_owed, f"{logical} was generated again, though a reset had cut its reply")
            if reply.turn is not None:
                return [*messages, message_of(reply)]
        raise GaveUp

    async def once(self, messages: Sequence[Message], logical: str, *, retry_count: int = 0) -> TurnReply | None:
        """The reply to one attempt without a key; None where it has none, and `refused` says why if it was no engine's
        own error. Raises SessionClosed, SessionNotFound."""
        self.refused = None
        try:
            reply = await self._take(messages, logical, None, self._turn(None, None, retry_count=retry_count))
        except (SessionClosed, SessionNotFound):
            raise
        except (AppError, Disconnected) as error:
            self._note(f"{self.name}: {logical} failed: {type(error).__name__} {error}")
            self.refused = error
            return None
        return reply if reply.turn is not None else None

    def _answers(self, logical: str) -> int:
        """How many replies to it have left a process."""
        return sum(turn.logical == logical for turn in self._history.turns_of(self.session_id))

    async def insist(self, what: Callable[[], Coroutine[Any, Any, T]], tries: int) -> T:
        """Raises GaveUp, and what a retry cannot mend."""
        for tried in range(tries):
            try:
                return await self._ask(what)
            except (SessionClosed, SessionNotFound, SessionExists, InvalidRequest):
                raise
            except (AppError, Disconnected, TimeoutError) as error:
                self._note(f"{self.name}: {type(error).__name__} {error}")
                await asyncio.sleep(0.2 * 2**tried * self._rng.random())
        raise GaveUp

    async def _ask(self, what: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with asyncio.timeout(self._world.weather.patience_s):
            return await what()

    def _process(self) -> Process:
        if self._sticky is None or not self._sticky.serving or self._rng.random() > self._habits.loyalty:
            self._sticky = self._world.pick()
        if self._sticky is None:
            raise Disconnected("nobody listens")
        return self._sticky

    def _turn(self, key: str | None, agent: str | None, *, retry_count: int = 0) -> InFlightTurn:
        return InFlightTurn(
            self.session_id,
            Waiter(lambda size: None),
            Stages(self._history.now),
            retry_key=None if key is None else hash_key(key),
            retry_count=retry_count,
            agent_id=agent,
            new_history=self.history,
        )

    async def _take(
        self, messages: Sequence[Message], logical: str, key: str | None, turn: InFlightTurn, unread_s: float = 0.0
    ) -> TurnReply:
        """`unread_s`: how long the request lies at the process before it is read."""
        process = self._process()
        control = self.control or self._wishes(self.session_id, logical)
        wish = {} if control is None else {"nvext": {"session_control": control}}
        body = self._world.spelling.body(turn, messages, wish)
        asked_at = self._history.now()
        wire = Wire(self._history.now, process.name, is_proxied=self._world.weather.is_proxied)
        self._wires.setdefault(logical, []).append(wire)
        turn.waiter.connection = wire
        self._note(f"{self.name} asks {process.name} for {logical}{' again' if turn.is_retry else ''}")
        weather = self._world.weather
        if self._world.happens(weather.unread):
            unread_s = weather.patience_s * self._rng.uniform(1, 3)

        async def begun() -> TurnReply:
            if unread_s:
                await asyncio.sleep(unread_s)
            wire.begin()
            return await recorded.take(self._world, process, turn, messages, body)

        def come() -> Coroutine[Any, Any, TurnReply]:
            wire.come()
            return begun()

        def sent(reply: TurnReply) -> None:
            self._sent(process, reply, messages, logical, key, asked_at, turn.retry_count, wire)

        work = process.call(come, sent)
        try:
            reply = await work
        except Reset as reset:
            self._tell(process, reset.reply, delivered=None)
            raise
        except (asyncio.CancelledError, Disconnected):
            if process.serving and not wire.is_proxied and self._rng.random() < 0.5:
                process.owner.context().run(turn.waiter.leave)
            raise
        finally:
            wire.end()
        self._note(f"{self.name} has turn {reply.turn} ({reply.status}) for {logical}")
        return reply

    def _sent(
        self,
        process: Process,
        reply: TurnReply,
        messages: Sequence[Message],
        logical: str,
        key: str | None,
        asked_at: float,
        count: int,
        wire: Wire,
    ) -> None:
        """A reply leaves the process: from now on the turn must be there for ever."""
        if reply.turn is None:
            return
        body = b"".join(reply.parts)
        content = msgspec.json.decode(body)["choices"][0]["message"]["content"]
        if spoken(content)[:12] != digest(messages)[: len(content)]:
            self._history.problem(f"turn {reply.turn} of {self.session_id} answers other messages than those asked")
        process.service.retries.sending(self.session_id, reply.turn)
        self._tell(process, reply, delivered=not wire.is_gone())
        if not reply.replayed and wire.over_at < wire.begun_at and not wire.is_proxied:
            others = [one for one in self._wires[logical] if one is not wire and one.process == wire.process]
            if all(other.over_at < wire.begun_at for other in others):
                self._history.problem(f"{logical} was begun although its client had gone")
        self._history.turn(
            Acknowledged(
                self.session_id,
                reply.turn,
                body,
                logical,
                key,
                reply.replayed,
                asked_at,
                self._history.now(),
                count if self.history == "linear" else 0,
                wire.came_at,
            )
        )

    def _tell(self, process: Process, reply: TurnReply, *, delivered: bool | None) -> None:
        """The process learns what became of a reply that it has sent."""
        if reply.turn is not None and process.serving:
            record = process.service.retries.record_delivery
            tell = partial(record, self.session_id, reply.turn, delivered=delivered, is_replay=reply.replayed)
            process.owner.context().run(tell)

    async def _resync(self) -> None:
        """Take over the history that is there. Raises GaveUp, SessionClosed."""
        self.messages = await self.insist(self._stored, TRIES)

    async def _stored(self) -> list[Message]:
        process = self._process()

        async def read() -> list[Message]:
            live = await process.service.sessions.require(self.session_id)
            leaf = live.session.leaf
            if leaf is None:
                return []
            raw = await process.service.cache.messages(live, leaf.number)
            found: list[Message] = msgspec.json.decode(b"[" + raw + b"]")
            return found

        return await process.call(
            lambda: recorded.call(self._world, process, self.session_id, Look(), read, recorded.shown), lambda _: None
        )

    async def _read(self) -> None:
        process = self._process()

        async def read() -> frozenset[int]:
            session = (await process.service.sessions.require(self.session_id)).session
            return frozenset(turn.number for turn in session.turns)

        await process.call(
            lambda: recorded.call(self._world, process, self.session_id, Look(), read, Numbers), lambda _: None
        )

    async def _create(self, config: SessionConfig) -> None:
        process = self._process()
        new = NewSession(self.session_id, config, None)
        self._history.sessions.setdefault(self.session_id, Site(config, (config.history or self.history) == "tree"))
        await self._fact(process, Create(), "created", lambda: process.service.sessions.create(new))

    async def _reward(self) -> None:
        process, value = self._process(), self._rng.random()

        async def assign() -> None:
            await process.service.sessions.assign_reward(self.session_id, value, {}, None)

        await self._fact(process, Reward(), "rewarded", assign, value)

    async def _close(self) -> None:
        process = self._process()
        await self._fact(process, Close(), "closed", lambda: process.service.sessions.close(self.session_id))

    async def _erase(self) -> None:
        process = self._process()
        await self._fact(process, Erase(), "erased", lambda: process.service.erasure.erase(self.session_id))

    async def _fact(
        self,
        process: Process,
        request: calls.Request,
        what: str,
        work: Callable[[], Coroutine[Any, Any, object]],
        value: float = 0.0,
    ) -> None:
        asked_at = self._history.now()
        self._note(f"{self.name} asks {process.name}: {what}")
        await process.call(
            lambda: recorded.call(self._world, process, self.session_id, request, work),
            lambda _: self._history.fact(Fact(self.session_id, what, asked_at, self._history.now(), value)),
        )

    async def _snapshot(self) -> None:
        process = self._world.pick()
        if process is not None:
            await self.insist(
                lambda: process.call(lambda: snapshot(process.service, self.session_id), lambda _: None), 1
            )

    async def _reuse_a_key(self) -> None:
        """An acknowledged turn's key with another body must never be answered with a turn."""
        mine = [turn for turn in self._history.turns_of(self.session_id) if turn.key is not None]
        if not mine:
            return
        turn = self._rng.choice(mine)
        assert turn.key is not None
        messages = [*self.messages, *results(self.messages), {"role": "user", "content": f"not {turn.logical}"}]
        again = self._turn(turn.key, None)
        try:
            reply = await self._ask(lambda: self._take(messages, f"not {turn.logical}", None, again))
        except (SessionClosed, SessionNotFound):
            raise
        except (AppError, Disconnected, TimeoutError):
            return
        if reply.turn is not None:
            self._history.problem(f"key {turn.key} was answered for another body too")

    async def _compact(self) -> None:
        """Go on behind a summary and the newest reply."""
        self.messages = [{"role": "user", "content": "So far"}, *self.messages[-1:]]
        await self.turn()

    # What clients do that share a session and do not wait for each other. What they are answered, the search judges.

    async def go_back(self) -> None:
        """Another turn in the newest one's place."""
        del self.messages[-2:]
        await self.turn()

    async def twice(self) -> None:
        """A keyed turn, sent to two processes at once."""
        messages, logical = self._new(self.messages)
        await asyncio.gather(*(self._send(messages, logical, logical) for _ in range(2)))

    async def again(self) -> None:
        """A keyed turn, and once it was answered the same again."""
        messages, logical = self._new(self.messages)
        for _ in range(2):
            await self._send(messages, logical, logical)

    async def rush(self) -> None:
        """Turns and rewards at once, at any processes, just when others do the same. One turn comes behind a reward: so
        its process knows of the other one."""
        await asyncio.sleep(RUSH_S - self._history.now() % RUSH_S)
        turns = [self._new(self.messages) for _ in range(2)]

        async def send(messages: list[Message], logical: str, rewards: int) -> None:
            self._sticky = None
            for _ in range(rewards):
                await self.insist(self._reward, 1)
            await self._send(messages, logical, None)

        await asyncio.gather(
            *(send(*turn, rewards) for rewards, turn in enumerate(turns)), self.insist(self._reward, 1)
        )

    async def earlier(self) -> None:
        """One of the session's newest requests once more, whoever sent it, without a mark unless it had a key."""
        asked = [one for one in self._history.asked.get(self.session_id, ()) if isinstance(one.request, Chat)]
        if not asked:
            return
        again = self._rng.choice(asked[-6:])
        assert isinstance(again.request, Chat)
        messages: list[Message] = [{"role": role, "content": text} for role, text in again.request.messages]
        turn = again.turn
        assert turn is not None
        await self._send(messages, messages[-1]["content"], None, agent=turn.agent_id, hashed=turn.retry_key)

    async def back(self) -> None:
        """A turn after what was there some turns ago."""
        before = self.messages[: max(0, len(self.messages) - 2 * self._rng.choice((1, 2, 3)))]
        await self._send(*self._new(before), None)

    async def other(self) -> None:
        """A turn that begins another conversation."""
        await self._send(*self._new([]), None)

    def _new(self, before: Sequence[Message]) -> tuple[list[Message], str]:
        self._asked += 1
        logical = f"{self.name}.{self._asked}"
        return [*before, {"role": "user", "content": logical}], logical

    async def _send(
        self,
        messages: list[Message],
        logical: str,
        key: str | None,
        agent: str | None = None,
        hashed: str | None = None,
    ) -> None:
        """Once, whatever comes of it; the client goes on from a reply. `hashed` is a key as the log has it.

        Raises SessionClosed, SessionNotFound.
        """
        turn = self._turn(key, agent)
        turn.retry_key = turn.retry_key or hashed
        try:
            reply = await self._ask(lambda: self._take(messages, logical, key, turn))
        except (SessionClosed, SessionNotFound):
            raise
        except (AppError, Disconnected, TimeoutError) as error:
            self._note(f"{self.name}: {logical} failed: {type(error).__name__} {error}")
            return
        if reply.turn is not None:
            self.messages = [*messages, message_of(reply)]


def message_of(reply: TurnReply) -> Message:
    """What the assistant says in it."""
    found: Message = msgspec.json.decode(b"".join(reply.parts))["choices"][0]["message"]
    return found


Step = Callable[[Client, SessionConfig], Coroutine[Any, Any, object]]

STEPS: Mapping[str, Step] = {
    "take": lambda client, _: client.turn(),
    "go_back": lambda client, _: client.go_back(),
    "compact": lambda client, _: client._compact(),
    "read": lambda client, _: client.insist(client._read, 2),
    "reward": lambda client, _: client.insist(client._reward, 2),
    "snapshot": lambda client, _: client._snapshot(),
    "create": lambda client, config: client.insist(lambda: client._create(config), 2),
    "reuse": lambda client, _: client._reuse_a_key(),
    "close": lambda client, _: client.insist(client._close, TRIES),
    "erase": lambda client, _: client.insist(client._erase, TRIES),
    "twice": lambda client, _: client.twice(),
    "earlier": lambda client, _: client.earlier(),
    "back": lambda client, _: client.back(),
    "other": lambda client, _: client.other(),
    "rush": lambda client, _: client.rush(),
}
"""What a client does by each of its habits."""


AGENTS = (None, None, "explorer")

HOWS = ("on", "on", "fork", "fork", "root", "carry", "again", "again")
"""After the newest history, after any, at the beginning, there with another branch's reply, or a request once more."""


class TreeClient(Client):
    """`histories` are the messages after each turn that it was answered; the first is the beginning."""

    history: History = "tree"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.histories: list[list[Message]] = [[]]

    async def _step(self, config: SessionConfig) -> None:
        if self._rng.random() < 0.5:
            await super()._step(config)
            return
        branches = [self._branch(self._rng.choice(HOWS)) for _ in range(self._rng.choice((1, 2, 3, 6)))]
        for outcome in await asyncio.gather(*branches, return_exceptions=True):
            if isinstance(outcome, GaveUp):
                self._note(f"{self.name} does not know")
            elif isinstance(outcome, BaseException):
                raise outcome

    async def _branch(self, how: str) -> None:
        """Raises as `turn`."""
        rng, agent, said = self._rng, self._rng.choice(AGENTS), None
        before = self.messages if how == "on" else rng.choice(self.histories)
        if how == "again" and len(before) > 1:
            before, said = before[:-2], before[-2]["content"]
        elif how == "carry":
            before = [{"role": "user", "content": "So far"}, *before[-1:]]
        elif how == "root":
            before = []
        self.messages = await self.turn_after(before, said, agent)
        self.histories.append(self.messages)
