"""Claims that reserve what limits have left, on both databases."""

from __future__ import annotations

import msgspec
import pytest
from helpers.log import opened
from helpers.store import Store

from app.domain.events import LimitReached, Limits
from app.features.budgets.operations import Budget, BudgetClaim, NoteLimit
from app.store.log import Appended
from app.store.log_turns import Known, Limited, Stale
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
