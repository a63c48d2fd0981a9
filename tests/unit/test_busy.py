"""When a session is busy: told at once, however long it took to look for an earlier reply, and not to a retry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from unit.making import SESSION, Book

from app.domain.fleet import Fleet
from app.errors import SessionBusy, StoreUnavailable
from app.protocols.registry import PROTOCOLS
from app.sessions.cache import CacheEntry
from app.settings import Settings
from app.store.log_sessions import Settled
from app.turn.in_flight import InFlightTurn, Placed, Stages, Waiter
from app.turn.points import TurnPoints
from app.turn.retries import Retries
from app.turn.turns import Turns

pytestmark = pytest.mark.anyio

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'


def request(key: str, joined: asyncio.Event) -> InFlightTurn:
    """`joined` is set once the request waits for another's turn."""
    waiter = Waiter(lambda size: None, watch=lambda waiter: joined.set())
    return InFlightTurn(SESSION, waiter, Stages(time.monotonic), retry_key=key)


def making(**collaborators: Any) -> Turns:
    """Turns that have these collaborators, and no other is asked."""
    names = ("cache", "writer", "retries", "claims", "token_in", "large_bodies", "fleet", "engines", "proofs")
    others: dict[str, Any] = dict.fromkeys((*names, "text_upstreams", "feature_faults"))
    calls, plain = SimpleNamespace(generate=None), {"points": TurnPoints(), "settings": Settings()}
    return Turns(**{**others, **plain, "calls": calls, **collaborators})


@pytest.mark.parametrize("repeats", [False, True])
async def test_a_turn_begins_while_an_earlier_reply_is_looked_for(repeats: bool) -> None:
    """It waits at the shut gate. The request that was looked for joins it if it repeats it, and else is told at once
    that the session is busy."""
    entry, at_gate, joined, never = CacheEntry(Book().session), asyncio.Event(), asyncio.Event(), asyncio.Event()
    first, second = request("key" if repeats else "another", asyncio.Event()), request("key", joined)

    async def get(session_id: str) -> CacheEntry:
        return entry

    async def repeated(entry: CacheEntry, placed: Placed) -> None:
        if placed.flight is second:
            await at_gate.wait()

    async def ended(entry: CacheEntry, placed: Placed) -> None:
        return None

    async def wait(turn: InFlightTurn) -> None:
        at_gate.set()
        await never.wait()

    def arrive(turn: InFlightTurn) -> Callable[[InFlightTurn], Awaitable[None]]:
        return wait

    points = TurnPoints()
    points.before_claim.append(arrive)
    turns = making(
        points=points,
        cache=SimpleNamespace(get=get, current=get, database=SimpleNamespace(is_sqlite=True)),
        retries=SimpleNamespace(joinable=partial(Retries.joinable, cast(Any, None)), repeated=repeated, ended=ended),
        claims=SimpleNamespace(forget=lambda turn: None),
        engines=SimpleNamespace(require_some=lambda run: None),
        fleet=SimpleNamespace(fleet=Fleet()),
        token_in=SimpleNamespace(prompts=None),
    )
    looking = asyncio.create_task(turns.take(second, PROTOCOLS["chat"], BODY))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(turns.take(first, PROTOCOLS["chat"], BODY))
    try:
        async with asyncio.timeout(10):
            if repeats:
                await asyncio.wait({asyncio.create_task(joined.wait()), looking}, return_when=asyncio.FIRST_COMPLETED)
                assert second.waiter.flight is first, looking
            else:
                with pytest.raises(SessionBusy):
                    await looking
    finally:
        for task in (looking, waiting):
            task.cancel()
        await asyncio.gather(looking, waiting, return_exceptions=True)
    assert turns.in_flight == 0


async def test_a_stored_reply_is_given_once_it_is_on_disk() -> None:
    """On PostgreSQL another process's commit is visible before: what makes sure of it fails here."""

    async def current(session_id: str) -> CacheEntry:
        return CacheEntry(Book().session)

    async def submit(operation: object) -> None:
        assert operation == Settled(SESSION)
        raise StoreUnavailable("the database is away")

    turns = making(
        cache=SimpleNamespace(current=current, database=SimpleNamespace(is_sqlite=False)),
        writer=SimpleNamespace(submit=submit),
    )
    read, session = PROTOCOLS["chat"].parse(BODY, True, None), Book().session
    placed = Placed(request("key", asyncio.Event()), read, 0, session, cast(Any, None))
    with pytest.raises(StoreUnavailable):
        await turns._stored_reply(placed, session, 1)
