"""Rows that are not events say what the events say, whatever happened; lists and pages of heads."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers.log import rolled_back
from helpers.store import Store, add_incarnation, commit, end_incarnation, release, reward

from app.domain.session import Session
from app.store.log import Appended

pytestmark = pytest.mark.anyio

NAMES = ("a", "b", "c")
ACTIONS = ("create", "claim", "claim", "commit", "commit", "commit", "release", "reward", "die", "end")


class Chaos:
    """Random operations on a few sessions, right ones and wrong ones."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.rng = random.Random(seed)
        self.other = store.me
        self.applied = 0

    async def step(self) -> None:
        name = self.rng.choice(NAMES)
        session = await self.store.session(name)
        version = session.version if session else 0
        action = self.rng.choice(ACTIONS)
        outcome: Any = None
        if action == "create":
            outcome = await self.store.create(name)
        elif action == "claim":
            live = session.path[-1] if session and session.path else 0
            turn = session.last_turn + 1 if session else 1
            expected = version + self.rng.choice((0, 0, 0, 1, -1))
            outcome = await self.store.claim(name, expected, incarnation=self.holder(), turn=turn, parent=live)
        elif action in ("commit", "release"):
            outcome = await self.end(name, session, action)
        elif action == "reward":
            outcome = await self.store.submit(reward(name, self.rng.random()))
        elif action == "die":
            await end_incarnation(self.store.database, self.other)
            self.other = await add_incarnation(self.store.database)
        elif self.rng.random() < 0.1:
            outcome = await (self.store.close if self.rng.random() < 0.7 else self.store.erase)(name)
        self.applied += isinstance(outcome, Appended)

    def holder(self) -> int:
        return self.rng.choice((self.store.me, self.other))

    async def end(self, name: str, session: Session | None, action: str) -> Any:
        opened = session.open_turn if session else None
        fence = opened.fence if opened and self.rng.random() < 0.8 else self.rng.randrange(1, 9)
        holder = opened.incarnation if opened and self.rng.random() < 0.8 else self.holder()
        turn = opened.turn if opened else 1
        if action == "release":
            return await self.store.submit(release(name, fence, holder, turn=turn))
        parent = opened.parent if opened else 0
        before = []
        if session and parent and self.rng.random() < 0.3:
            before, parent = [rolled_back(session.turn(parent).parent, parent)], session.turn(parent).parent
        return await self.store.submit(commit(name, fence, holder, turn=turn, parent=parent, before=before))


@pytest.mark.parametrize("seed", range(4))
async def test_head_equals_fold_after_any_operations(store: Store, seed: int) -> None:
    chaos = Chaos(store, seed)
    for _ in range(80):
        await chaos.step()
    assert chaos.applied > 10
    for name in NAMES:
        if await store.head(name) is not None:
            await store.head_equals_fold(name)
