"""Claims that reserve what limits have left, on both databases."""

from __future__ import annotations

import msgspec
import pytest
from helpers.log import created, opened
from helpers.store import Store

from app.domain.events import LimitReached, Limits
from app.features.budgets.operations import Budget, BudgetClaim, NoteLimit
from app.store.log import Appended
from app.store.log_sessions import Create, JoinRollout
from app.store.log_turns import Claim, Known, Limited, Stale
from app.store.writer import apply_all

pytestmark = pytest.mark.anyio


async def test_what_claims_of_one_transaction_have_reserved_is_not_used_up(store: Store) -> None:
    budget = Budget("s0", Limits(tokens=5))
    claims = []
    for session_id in ("s0", "s1"):
        await store.create(session_id, at=1.0)
        event = opened(1, 0, store.me)
        claims.append(BudgetClaim(session_id, Known(1, 1.0, 0), 2.0, event, 60.0, budgets=[budget]))
    first, second = await store.database.write(lambda tx: apply_all(tx, claims), durable=True)
    assert isinstance(first, Appended)
    assert second == Limited("tokens", frozenset({store.me}))
    [again] = await store.database.write(lambda tx: apply_all(tx, claims[1:]), durable=True)
    assert again == Limited("tokens", frozenset({store.me}))


async def test_two_requests_that_are_refused_at_once_are_noted_once(store: Store) -> None:
    await store.create("s0", at=1.0)
    note = NoteLimit("s0", 2.0, LimitReached("turns", 0), known=1)
    first, second = [await store.database.write(note.apply, durable=True) for _ in range(2)]
    assert (type(first), type(second)) == (Appended, Stale)
    third = await store.database.write(msgspec.structs.replace(note, known=2).apply, durable=True)
    assert type(third) is Appended


async def test_a_claim_that_was_decided_before_its_rollout_had_limits_is_decided_again(store: Store) -> None:
    """The root comes after its child: until the child's log says so, its process knows of no limits."""
    limits = Limits(tokens=5)
    await store.writer.submit(Create("child", 1.0, created(parent="root"), None))
    plain = Claim("child", Known(1, 1.0, 0), 2.0, opened(1, 0, store.me), 60.0)
    await store.writer.submit(Create("root", 1.5, created(limits=limits), None))
    await store.writer.submit(JoinRollout("child", 1.6))
    own = BudgetClaim(**msgspec.structs.asdict(plain), budgets=[Budget("child", Limits(tokens=50))])
    for early in (plain, own):
        assert await store.writer.submit(early) == Stale()
    again = msgspec.structs.replace(own, known=Known(2, 1.6, 0), budgets=[Budget("root", limits)])
    claimed = await store.writer.submit(again)
    assert isinstance(claimed, Appended)
    assert claimed.events[0].event.reserved == 5  # type: ignore[union-attr]
