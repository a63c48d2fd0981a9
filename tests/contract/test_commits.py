"""What a commit leaves in memory for the next turn."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
from helpers.store import LEASE_S, Store
from unit.making import assistant, user, validated

from app.domain import decide
from app.domain.history import RequestHistory
from app.errors import ClaimLost
from app.protocols.registry import PROTOCOLS
from app.sessions.cache import SessionCache
from app.sessions.event_log import Followers
from app.settings import Settings
from app.turn.claims import Claims
from app.turn.in_flight import EngineCall, Generated, InFlightTurn, Placed, Stages, Waiter
from app.turn.points import TurnPoints
from app.upstream.body import Body
from app.upstream.client import EngineReply

pytestmark = pytest.mark.anyio

PARAMS = b'{"model":"m"}'


class Process:
    """Takes turns of session `s` as a process does, with an engine's replies that are given."""

    def __init__(self, store: Store) -> None:
        self.cache = SessionCache(store.database, store.writer, 1 << 20)
        self._claims = Claims(
            points=TurnPoints(),
            retries=cast(Any, None),
            placement=cast(Any, SimpleNamespace(binding=lambda choice, session, engine: None)),
            settings=Settings(),
            cache=self.cache,
            writer=store.writer,
            followers=Followers(),
            clock=time.time,
            incarnation=lambda: store.me,
            lease_s=lambda: LEASE_S,
            lease_left=cast(Any, None),
        )

    async def take(
        self,
        messages: list[dict[str, Any]],
        answer: dict[str, Any],
        params: bytes = PARAMS,
        abandoned: Literal["not_released"] | None = None,
    ) -> None:
        """`abandoned`: why the claim ends before the commit."""
        entry = await self.cache.open("s")
        request = PROTOCOLS["chat"].parse(json.dumps({"messages": messages}).encode(), True, None)
        waiter = Waiter(lambda size: None)
        flight = InFlightTurn("s", waiter, Stages(time.monotonic), waiters=[waiter])
        history = RequestHistory(cast(Any, request).messages, "tolerant")
        history.check(entry.index, entry.session)
        placed = Placed(flight, request, 0, entry.session, history)
        turn = await self._claims.take(placed, entry, has_waited=False, is_alone=False)
        assert turn is not None
        plan, new = turn.plan, history.new(turn.plan)
        call = EngineCall("chat", params, None, new, None, "", new=new)
        if plan.base_messages:
            call.messages = (await self.cache.messages(entry, plan.parent), *new)
        message = json.dumps(answer).encode()
        message_hash = history.reply_hashes(message)[0]
        reply = validated([1, 2, 3], 0, 1, message_hash, message=message, exchange=b"exchange")
        if abandoned is not None:
            await self._claims.abandon(turn, abandoned)
        generated = Generated(EngineReply(200, [], Body([b"{}"])), reply)
        await self._claims.commit(turn, call, generated, is_alone=False)
        self.turn, self.call = turn, call  # Its reply is still being sent.


async def test_a_turns_messages_are_added_to_the_stored_history_without_a_copy_of_it(sqlite_store: Store) -> None:
    """Also while the turn's reply is being sent: a copy each turn costs the square of a long session."""
    await sqlite_store.create("s")
    process = Process(sqlite_store)
    await process.take([user("a")], assistant("b"))
    entry = await process.cache.open("s")
    before = await process.cache.messages(entry, 1)
    assert isinstance(before, memoryview)
    text = before.obj
    del before
    await process.take([user("a"), assistant("b"), user("c")], assistant("d"))
    after = await process.cache.messages(entry, 2)
    assert isinstance(after, memoryview)
    assert after.obj is text
    assert json.loads(b"[" + after + b"]") == [user("a"), assistant("b"), user("c"), assistant("d")]


async def test_the_parameters_that_are_kept_for_the_next_turn_are_counted(sqlite_store: Store) -> None:
    await sqlite_store.create("s")
    process = Process(sqlite_store)
    await process.take([user("a")], assistant("b"), b'{"guided_json":"%s"}' % (b"x" * 100_000))
    assert process.cache.size > 100_000


async def test_nothing_is_decided_for_a_turn_whose_claim_has_ended(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it continues may be gone from the session, so that deciding would fail."""
    await sqlite_store.create("s")
    monkeypatch.setattr(decide, "commit_turn", None)
    with pytest.raises(ClaimLost):
        await Process(sqlite_store).take([user("a")], assistant("b"), abandoned="not_released")
