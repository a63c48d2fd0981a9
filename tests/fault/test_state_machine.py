"""The same rules over three stores: whatever clients and processes do, the service answers as a simple model does.

Processes are the real service over a real store, in this process: one after the other on SQLite, two at a time on
PostgreSQL and in memory. A crash takes the store away from a process and ends its tasks; that a killed one's
claims are void is then known to the others, as `kill -9` on one host would be.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from app.domain.events import SessionConfig
from app.errors import (
    AppError,
    ClaimLost,
    HistoryMismatch,
    IdempotencyMismatch,
    RollbackTooDeep,
    SessionBusy,
    SessionClosed,
    SessionEnded,
)
from app.sessions.lifecycle import NewSession
from app.sessions.recovery import Recovery
from app.store import incarnations
from app.turn.in_flight import TurnReply
from fault.modelled import Engine, Flight, Message, Model, Node, Place, Turn
from fault.table import Tally
from tests.tools.simulation.engine import digest

SELDOM = st.sampled_from((False, False, False, True))
"""An ended session is of little use to the other rules."""


class Machine(RuleBasedStateMachine):
    """The rules. Subclasses name the place."""

    place: Place
    tally: Tally
    ids: Iterator[int]
    sessions: Bundle[Model] = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.place.begin()
        self.models: list[Model] = []
        self.nodes: list[Node] = []
        self.texts = itertools.count(1)
        self.engine = Engine()

    def run(self, work: Any) -> Any:
        return self.place.runner.run(work)

    @property
    def flying(self) -> bool:
        return any(model.flight is not None for model in self.models)

    def any_node(self, choice: int) -> Node:
        return self.nodes[choice % len(self.nodes)]

    async def started(self) -> Node:
        node = Node(self.place, f"host-{next(self.ids)}", self.engine)
        await node.start()
        return node

    @initialize(target=sessions, window=st.integers(0, 2))
    def begin_with_all(self, window: int) -> Model:
        async def start() -> None:
            self.nodes = [await self.started() for _ in range(self.place.most)]

        self.run(start())
        return self.create(window, 0)

    @rule(target=sessions, window=st.integers(0, 2), node=st.integers(0, 7))
    def create(self, window: int, node: int) -> Model:
        model = Model(f"machine-{next(self.ids)}", SessionConfig(rollback_window=window))
        self.run(self._create(model, node))
        self.models.append(model)
        return model

    async def _create(self, model: Model, node: int) -> None:
        await self.any_node(node).service.sessions.create(NewSession(model.id, model.config, None))

    @rule(model=sessions, node=st.integers(0, 7))
    def create_again(self, model: Model, node: int) -> None:
        if model.status == "open":
            self.run(self._create(model, node))
        else:
            self.refused(SessionEnded, self._create(model, node))

    @rule(model=sessions, nodes=st.lists(st.integers(0, 7), min_size=1, max_size=4))
    def turns(self, model: Model, nodes: list[int]) -> None:
        for node in nodes:
            self.take(model, node, model.messages, 0)

    @rule(model=sessions, node=st.integers(0, 7), back=st.integers(1, 3))
    def rollback(self, model: Model, node: int, back: int) -> None:
        if back <= len(model.live):
            # All of it is discarded only by the first turn's input once more.
            base = list(model.live[-back - 1].messages) if back < len(model.live) else None
            self.take(model, node, base, back)

    @rule(model=sessions, node=st.integers(0, 7))
    def another_conversation(self, model: Model, node: int) -> None:
        """It shares nothing with what is live, and discards none of it, whatever the window."""
        if model.live:
            self.take(model, node, [], 0)

    def take(self, model: Model, node: int, base: list[Message] | None, back: int) -> None:
        """A turn after `base` that discards `back` live ones; after None the first live turn's input once more."""
        text = f"{model.id}:{next(self.texts)}"
        new = [{"role": "user", "content": text}]
        messages = [*base, *new] if base is not None else model.live[0].messages[:-1]

        async def taken() -> TurnReply:
            return await self.any_node(node).take(model, messages, text)

        if model.status != "open":
            self.refused(SessionClosed, taken())
        elif model.flight is not None and not model.flight.lost:
            self.refused(SessionBusy, taken())
        elif model.flight is not None and model.flight.node is self.any_node(node):
            # The process does not know yet that its turn was taken over.
            self.refused(SessionBusy, taken())
        elif model.live and base == []:
            self.refused(HistoryMismatch, taken())
        elif back > model.config.rollback_window:
            self.refused(RollbackTooDeep, taken())
        else:
            asked_at = self.place.history.now()
            turn = Turn(model.open(), messages, text, self.any_node(node).incarnation)
            self.committed(model, turn, asked_at, self.run(taken()), back)

    def committed(self, model: Model, turn: Turn, asked_at: float, answer: TurnReply, back: int = 0) -> None:
        """`turn` has its request's messages alone."""
        model.committed += 1
        body = b"".join(answer.parts)
        message = msgspec.json.decode(body)["choices"][0]["message"]
        assert answer.turn == turn.number
        assert not answer.replayed
        assert message["content"].startswith(digest(turn.messages))
        del model.live[len(model.live) - back :]
        model.live.append(replace(turn, messages=[*turn.messages, message]))
        self.tally.acknowledged += 1
        self.place.told(model.id, answer, turn, asked_at)

    def refused(self, kind: type[AppError], work: Any) -> None:
        with pytest.raises(kind):
            self.run(work)

    @rule(model=sessions, node=st.integers(0, 7))
    def retry(self, model: Model, node: int) -> None:
        """The last reply again, to the byte, whichever process is asked."""
        if not model.live or model.live[-1].key is None:
            return
        last, at = model.live[-1], self.any_node(node)
        if model.flight is not None and model.flight.lost and model.flight.node is at:
            # The process does not know yet that its turn was taken over: a retry waits there for its end.
            return

        async def taken() -> TurnReply:
            return await at.take(model, last.messages[:-1], last.key)

        if model.status != "open":
            self.refused(SessionClosed, taken())
            return
        asked_at = self.place.history.now()
        try:
            answer = self.run(taken())
        except SessionBusy:
            assert model.flight is not None
            return
        assert answer.replayed
        assert answer.turn == last.number
        self.place.told(model.id, answer, last, asked_at)

    @rule(model=sessions, node=st.integers(0, 7))
    def ask_again(self, model: Model, node: int) -> None:
        """The last request without a mark: the last reply, if its process died before the client surely had it."""
        if not model.live or model.status != "open" or model.flight is not None:
            return
        last, at, asked_at = model.live[-1], self.any_node(node), self.place.history.now()

        async def taken() -> TurnReply:
            return await at.take(model, last.messages[:-1], None)

        if self.run(at.has_died(last.incarnation)):
            answer = self.run(taken())
            assert (answer.replayed, answer.turn) == (True, last.number)
            self.place.told(model.id, answer, last, asked_at)
        elif model.config.rollback_window:
            turn = Turn(model.open(), last.messages[:-1], None, at.incarnation)
            self.committed(model, turn, asked_at, self.run(taken()), 1)
        else:
            self.refused(RollbackTooDeep, taken())

    @rule(model=sessions, node=st.integers(0, 7))
    def misuse_a_key(self, model: Model, node: int) -> None:
        """The key of the last turn with another request."""
        if not model.live or not model.live[-1].key or model.status != "open" or model.flight is not None:
            return
        messages = [*model.messages, {"role": "user", "content": "something else"}]

        async def taken() -> TurnReply:
            return await self.any_node(node).take(model, messages, model.live[-1].key)

        self.refused(IdempotencyMismatch, taken())

    @rule(model=sessions, node=st.integers(0, 7))
    def begin(self, model: Model, node: int) -> None:
        """A turn whose engine takes its time."""
        if model.status != "open" or model.flight is not None:
            return
        text = f"{model.id}:{next(self.texts)}"
        messages = [*model.messages, {"role": "user", "content": text}]

        async def begun() -> Flight:
            go = self.engine.hold(text)
            self.engine.heard.clear()
            at = self.any_node(node)
            task = at.take(model, messages, text)
            heard = asyncio.ensure_future(self.engine.heard.wait())
            await asyncio.wait({task, heard}, return_when=asyncio.FIRST_COMPLETED)
            assert heard.done(), task.exception()
            return Flight(model.open(), self.place.history.now(), at, messages, text, go, {task: at})

        model.flight = self.run(begun())

    @precondition(lambda self: self.flying)
    @rule(model=sessions, node=st.integers(0, 7))
    def join(self, model: Model, node: int) -> None:
        """A retry of the turn in flight, here or in another process: it waits for it."""
        flight = model.flight
        if flight is None or flight.lost:
            return

        async def joined() -> None:
            at = self.any_node(node)
            flight.tasks[at.take(model, flight.messages, flight.key)] = at
            await asyncio.sleep(0)

        self.run(joined())

    @precondition(lambda self: self.flying)
    @rule(model=sessions)
    def finish(self, model: Model) -> None:
        """The engine answers; all who wait get the one turn, or learn that it was lost."""
        flight, model.flight = model.flight, None
        if flight is None:
            return

        async def finished() -> list[TurnReply | BaseException]:
            flight.go.set()
            return await asyncio.gather(*flight.tasks, return_exceptions=True)

        answers = self.run(finished())
        if model.status != "open":
            assert all(isinstance(answer, SessionClosed) for answer in answers), answers
        elif flight.lost:
            assert isinstance(answers[0], ClaimLost), answers
        else:
            own, *others = answers
            assert isinstance(own, TurnReply), own
            turn = Turn(flight.number, flight.messages, flight.key, flight.node.incarnation)
            self.committed(model, turn, flight.asked_at, own)
            self.same(own, others)

    def same(self, own: TurnReply, others: Sequence[TurnReply | BaseException]) -> None:
        for other in others:
            assert isinstance(other, TurnReply), other
            assert other.replayed
            assert (other.turn, b"".join(other.parts)) == (own.turn, b"".join(own.parts))

    @precondition(lambda self: self.place.most > 1 and self.flying)
    @rule(model=sessions)
    def takeover(self, model: Model) -> None:
        """The holder is taken for dead; another process serves the retry, and the holder's reply comes too late."""
        flight = model.flight
        if flight is None or flight.lost or model.status != "open" or len(flight.tasks) > 1:
            return
        other = next(node for node in self.nodes if node is not flight.node)

        async def taken_over() -> TurnReply:
            await other.mortal.write(lambda tx: incarnations.end(tx, flight.node.incarnation), durable=True)
            answer = await other.take(model, flight.messages, flight.key)
            await flight.node.mortal.write(
                lambda tx: incarnations.heartbeat(tx, flight.node.incarnation), durable=False
            )
            return answer

        # What other sessions have in flight there is taken over only by whoever asks for them meanwhile.
        flight.lost = True
        asked_at = self.place.history.now()
        turn = Turn(model.open(), flight.messages, flight.key, other.incarnation)
        self.committed(model, turn, asked_at, self.run(taken_over()))
        self.tally.tried += 1

    @rule(model=sessions, node=st.integers(0, 7), value=st.floats(-1, 1))
    def reward(self, model: Model, node: int, value: float) -> None:
        async def assigned() -> int:
            return await self.any_node(node).service.sessions.assign_reward(model.id, value, {}, None)

        if model.status == "erased":
            self.refused(SessionClosed, assigned())
        else:
            self.run(assigned())

    @rule(model=sessions, node=st.integers(0, 7), sure=SELDOM)
    def close(self, model: Model, node: int, sure: bool) -> None:
        if not sure:
            return

        async def closed() -> None:
            await self.any_node(node).service.sessions.close(model.id)

        if model.status == "open":
            self.run(closed())
            model.status = "closed"
        else:
            self.refused(SessionClosed, closed())

    @rule(model=sessions, node=st.integers(0, 7), sure=SELDOM)
    def erase(self, model: Model, node: int, sure: bool) -> None:
        if not sure:
            return

        async def erased() -> None:
            await self.any_node(node).service.erasure.erase(model.id)

        self.run(erased())
        model.status = "erased"

    @rule(node=st.integers(0, 7), orderly=st.booleans())
    def end(self, node: int, orderly: bool) -> None:
        """A process stops, or crashes; another takes its place. What it had in flight came to nothing."""
        gone = self.any_node(node)
        flights = [model.flight for model in self.models if model.flight is not None]
        waiting = {task: flight for flight in flights for task, at in flight.tasks.items() if at is gone}
        if orderly and waiting:
            return

        async def replaced() -> list[Any]:
            if orderly:
                await gone.stop()
            else:
                gone.mortal.dead = True
                for task in waiting:
                    task.cancel()
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            if not orderly:
                await gone.crash()
            self.nodes[self.nodes.index(gone)] = await self.started()
            return answers

        for answer in self.run(replaced()):
            assert isinstance(answer, BaseException), answer
        for task, flight in waiting.items():
            del flight.tasks[task]
        for model in self.models:
            if model.flight is not None and model.flight.node is gone:
                self.inherited(model, model.flight)
                model.flight = None
        self.tally.tried += 1

    def inherited(self, model: Model, flight: Flight) -> None:
        """Retries that wait elsewhere for a turn of a process that is gone: one of them generates it, for all."""
        if not flight.tasks:
            return

        async def landed() -> list[TurnReply | BaseException]:
            return await asyncio.gather(*flight.tasks, return_exceptions=True)

        answers = self.run(landed())
        if model.status != "open":
            assert all(isinstance(answer, SessionClosed) for answer in answers), answers
            return
        (own,) = [answer for answer in answers if isinstance(answer, TurnReply) and not answer.replayed]
        heir = next(iter(flight.tasks.values())).incarnation
        self.committed(model, Turn(model.open(), flight.messages, flight.key, heir), flight.asked_at, own)
        self.same(own, [answer for answer in answers if answer is not own])

    @invariant()
    def every_session_is_as_the_model_says(self) -> None:
        async def seen(model: Model) -> tuple[int, int]:
            session = (await self.nodes[-1].service.sessions.require(model.id)).session
            return len(session.turns), len(session.path)

        for model in self.models[-2:]:
            if model.status == "open" and self.nodes:
                assert self.run(seen(model)) == (model.committed, len(model.live))

    def teardown(self) -> None:
        for model in self.models:
            self.finish(model)

        async def ended() -> None:
            for node in self.nodes:
                await node.stop()

        self.run(ended())
        if self.place.is_memory:
            judge(self.place, self.tally)


def judge(place: Place, tally: Tally) -> None:
    assert place.history.problems == []
    found = place.runner.run(place.audit())
    tally.lost += len(found.lost)
    tally.doubled += found.doubled
    assert found.problems == [], found.problems[:20]


TITLE = "rules over memory, SQLite and PostgreSQL"


def placed(place: Place, tally: Tally) -> type[Machine]:
    class Placed(Machine):
        pass

    Placed.place, Placed.tally, Placed.ids = place, tally, itertools.count(1)
    return Placed


def explore(url: str | None, tally: Tally, examples: int, steps: int) -> None:
    """Run the machine from seeded choices; a failure is shrunk to the fewest rules that show it."""
    place = Place(url)
    try:
        run_state_machine_as_test(
            placed(place, tally),
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                derandomize=True,
                deadline=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
        judge(place, tally)
    finally:
        place.end()


@pytest.fixture(params=("memory", "sqlite", "postgresql"))
def url(request: pytest.FixtureRequest) -> str | None:
    """A store of each kind; None: in memory."""
    if request.param == "memory":
        return None
    found: str = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    return found


@pytest.mark.long
@pytest.mark.fault(15, TITLE)
def test_any_order_of_rules(url: str | None, tally: Tally) -> None:
    explore(url, tally, 40 if url is None else 12, 40)


@pytest.mark.fault(15, TITLE)
def test_the_turn_of_a_dead_process_is_not_in_flight(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even before its claim was found and abandoned: a request that does not fit is 400, not 409."""
    monkeypatch.setattr(Recovery, "_sweep", no_sweep)
    place = Place(None)
    machine = placed(place, tally)()
    model = machine.begin_with_all(window=0)
    machine.begin(model=model, node=0)
    machine.finish(model=model)
    machine.begin(model=model, node=0)
    machine.end(node=0, orderly=False)
    machine.rollback(model=model, node=0, back=1)
    machine.another_conversation(model=model, node=1)
    machine.teardown()
    place.end()


@pytest.mark.fault(15, TITLE)
def test_the_reply_of_a_process_that_died_is_given_to_an_unmarked_request(sqlite_url: str, tally: Tally) -> None:
    place = Place(sqlite_url)
    machine = placed(place, tally)()
    model = machine.begin_with_all(window=1)
    machine.turns(model=model, nodes=[0])
    machine.ask_again(model=model, node=0)
    assert model.committed == 2
    machine.end(node=0, orderly=False)
    machine.ask_again(model=model, node=0)
    assert model.committed == 2
    machine.teardown()
    place.end()


async def no_sweep(recovery: Recovery) -> None:
    """A process that has not looked for dead ones yet."""
