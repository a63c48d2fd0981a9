"""A tree of turns grown by a script: requests opened together, committed in any order, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from helpers.log import float64, int32
from making import SESSION, assistant, raws, user, validated

from app.domain.canonical import canonical_hash
from app.domain.decide import TurnBlobs, commit_turn, open_turn, token_parent
from app.domain.events import (
    BlobsTombstoned,
    ChunkKey,
    ChunkRef,
    Event,
    PayloadRef,
    Recorded,
    SessionConfig,
    SessionCreated,
    TurnCommitted,
    TurnOpened,
    TurnRejected,
)
from app.domain.history import RequestHistory
from app.domain.rules import Plan, TreeIndex
from app.domain.samples import TurnTokens
from app.domain.session import Session, fold

Message = dict[str, Any]
Plain = tuple[tuple[str, str], ...]
"""Messages as the default matcher compares them."""

ROW_BYTES = 2


class Ask(msgspec.Struct, frozen=True):
    """A request. Numbers choose among what is there; None and 0 choose nothing.

    It continues the history of a committed turn (`after`), or sends an earlier request again (`repeats`), with some new
    texts behind a sampled message of another turn (`carries`). `respelled`: the client pads what it sends back.
    `waits`: it is read in one round and joins in the next. `stays`: the rounds that it stays in flight. `place` decides
    when it ends within a round.
    """

    after: int = 0
    repeats: int = 0
    texts: tuple[str, ...] = ("a",)
    carries: int = 0
    agent: str | None = None
    drifts: bool = False
    respelled: bool = False
    reply: str = "x"
    output: int = 2
    brings: bool = False
    waits: bool = False
    stays: int = 0
    fails: bool = False
    place: int = 0


class Grown(msgspec.Struct):
    """A request's life: what was sent, where it joined, and what it became."""

    ask: Ask
    messages: list[Message]
    agent: str | None
    incoming: RequestHistory
    plan: Plan | None = None
    opened: TurnOpened | None = None
    fence: int = 0
    round: int = 0
    shared: tuple[ChunkRef, ...] = ()
    committed: TurnCommitted | None = None
    history: list[Message] = []
    tokens: list[int] = []
    output: list[int] = []

    @property
    def number(self) -> int:
        assert self.opened is not None
        return self.opened.turn


def plain(messages: Sequence[Message]) -> Plain:
    return tuple((message["role"], message["content"].strip()) for message in messages)


class Tree:
    """The log, its fold, the index, and everything that was asked. `look` is called after each event that ends a turn.

    `trim`: how many of its parent's last tokens every prompt leaves out.
    """

    def __init__(
        self, config: SessionConfig, look: Callable[[Tree], None], *, trim: int = 0, max_bytes: int | None = None
    ) -> None:
        self.events: list[Recorded] = []
        self.index = TreeIndex()
        self.asked: list[Grown] = []
        self.turns: dict[int, Grown] = {}
        self.ended: list[int] = []
        self.freed: set[ChunkKey] = set()
        self.content: dict[int, TurnTokens] = {}
        self.trim = trim
        self.max_bytes = max_bytes
        self._look = look
        self._waiting: list[Grown] = []
        self._add(SessionCreated(config, body_hash="00"))

    def grow(self, rounds: Sequence[Sequence[Ask]], order: Callable[[int], int] = lambda place: place) -> None:
        """`order` says in which order the turns of a round end."""
        for asks in [*rounds, ()]:
            read = [self._read(ask) for ask in asks]
            waited, self._waiting = self._waiting, [one for one in read if one.ask.waits]
            for one in (*waited, *(one for one in read if not one.ask.waits)):
                self._open(one)
            ending = [one for one in self.flying if not one.round or not asks]
            for one in self.flying:
                one.round -= 1
            for one in sorted(ending, key=lambda one: (order(one.ask.place), one.number)):
                self._end(one)
                self._look(self)

    @property
    def flying(self) -> list[Grown]:
        """The turns in flight."""
        return [one for one in self.asked if one.opened is not None and one.number in self.session.open_turns]

    def _add(self, *events: Event) -> None:
        for event in events:
            recorded = Recorded(len(self.events) + 1, float(len(self.events)), event)
            self.events.append(recorded)
            state = fold(SESSION, [recorded], None if recorded.seq == 1 else self.session)
            assert state is not None
            self.session: Session = state
            if isinstance(event, TurnCommitted):
                self.index.add(state.turns[event.turn])
            if isinstance(event, BlobsTombstoned):
                self.freed |= set(event.freed)

    def _read(self, ask: Ask) -> Grown:
        committed = sorted(self.turns)
        messages: list[Message] = []
        agent = ask.agent
        if ask.repeats and self.asked:
            earlier = self.asked[ask.repeats % len(self.asked)]
            messages, agent = list(earlier.messages), earlier.agent
        else:
            if ask.after and committed:
                messages = list(self.turns[committed[ask.after % len(committed)]].history)
            if ask.carries and committed:
                messages.append(self.turns[committed[ask.carries % len(committed)]].history[-1])
            messages += [user(text) for text in ask.texts]
        if ask.respelled:
            messages = [{**message, "content": f"{message['content']} "} for message in messages]
        one = Grown(ask, messages, agent, RequestHistory(raws(messages), self.session.config.matcher))
        one.incoming.check(self.index)
        self.asked.append(one)
        return one

    def _open(self, one: Grown) -> None:
        session = self.session
        one.plan = one.incoming.join(session, self.index, one.agent)
        one.opened = open_turn(
            session,
            one.plan,
            incarnation=1,
            body_hash=one.incoming.whole_hash,
            retry_key=None,
            agent_id=one.agent,
        )
        before = session.payload(one.plan.parent, "routed_experts")
        one.shared = () if before is None else before.chunks
        self._add(one.opened)
        one.fence, one.round = self.session.version, one.ask.stays

    def _end(self, one: Grown) -> None:
        if one.ask.fails:
            self._add(TurnRejected(one.number, one.fence, "upstream_invalid"))
            return
        assert one.plan is not None
        assert one.opened is not None
        reply = assistant(one.ask.reply)
        parent = token_parent(self.session, one.plan)
        known = [] if parent is None else self.turns[parent.number].tokens
        base = 0 if one.ask.drifts else max(len(known) - self.trim, 0)
        one.output = [100 * one.number + place for place in range(one.ask.output)]
        one.tokens = [*known[:base], -one.number, *one.output]
        answer = validated(
            one.tokens,
            base,
            len(one.output),
            canonical_hash(reply, self.session.config.matcher),
            trimmed=self.trim,
        )
        events = commit_turn(
            self.session,
            self.index,
            one.opened,
            one.fence,
            one.plan,
            one.incoming,
            answer,
            blobs=TurnBlobs(0),
            payloads=(self._payload(one),) if one.ask.brings else (),
            max_replay_bytes=self.max_bytes,
        )
        [one.committed] = [event for event in events if isinstance(event, TurnCommitted)]
        one.history = [*one.messages, reply]
        self.turns[one.number] = one
        self.ended.append(one.number)
        self.content[one.number] = TurnTokens(
            one.committed, int32(one.tokens[base : len(one.tokens) - len(one.output)]), int32(one.output),
            float64([-1.0] * len(one.output)),
        )  # fmt: skip
        self._add(*events)

    def _payload(self, one: Grown) -> PayloadRef:
        """The rows of its parent, shared, and one more."""
        start = one.shared[-1].start + 1 if one.shared else 0
        chunk = ChunkRef(one.fence, 0, start, 1, "uint8", ROW_BYTES, "0" * 32)
        return PayloadRef("routed_experts", 0, start + 1, 0, (2,), (chunk,), len(one.shared))
