"""Staged tokens: written under a claim, gone with its end, taken over after a crash; on both databases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from helpers.store import CLAIMED_AT, LEASE_S, Store, add_incarnation, commit, end_incarnation, release
from sqlalchemy import select

from app.features.resume import staged_tokens as staged
from app.features.resume import staging
from app.features.resume.schema import staged_tokens as table
from app.features.resume.staged_tokens import DropStaged, StagedRow, StageTokens, TakeOverStaged
from app.features.resume.staging import StagedTurn, StagingCounters
from app.settings import Settings
from app.store.log import Appended
from app.store.log_sessions import Close
from app.store.log_turns import AbandonDead

pytestmark = pytest.mark.anyio

REQUEST = "a" * 64


def row(number: int, data: bytes = b"tokens") -> StagedRow:
    return StagedRow(number, 0, "http://engine", None, "raw", data)


async def stage(store: Store, fence: int, *numbers: int, holder: int | None = None) -> list[bool]:
    writes = [StageTokens("s", fence, holder or store.me, CLAIMED_AT, REQUEST, row(number)) for number in numbers]
    return [await store.submit(one) for one in writes]


async def claimed(store: Store) -> int:
    """A session with an open turn that has staged two rows; the turn's fence."""
    await store.create("s")
    await store.claim("s", 1)
    assert await stage(store, 2, 0, 1) == [True, True]
    return 2


async def rows(store: Store) -> list[tuple[int, int]]:
    """The staged rows of all sessions, by fence and number."""
    query = select(table.c.fence, table.c.number).order_by(table.c.fence, table.c.number)
    return await store.database.read(lambda connection: [(one[0], one[1]) for one in connection.execute(query)])


async def left(store: Store, request: str = REQUEST) -> Any:
    return await store.database.read(lambda connection: staged.left_by(connection, "s", request))


async def died(store: Store) -> int:
    """The turn of a process that has died with two rows; its fence."""
    other = await add_incarnation(store.database)
    await store.create("s")
    await store.claim("s", 1, incarnation=other)
    assert await stage(store, 2, 0, 1, holder=other) == [True, True]
    await end_incarnation(store.database, other)
    await store.submit(AbandonDead("", 10, 4.0, LEASE_S))
    return 2


async def test_only_the_holder_of_an_open_turn_can_stage(store: Store) -> None:
    fence, other = await claimed(store), await add_incarnation(store.database)
    assert await stage(store, fence, 2, holder=other) == [False]
    assert await stage(store, fence + 1, 2) == [False]
    assert await rows(store) == [(2, 0), (2, 1)]
    assert await left(store) is None
    assert len(await store.log("s")) == 2


@pytest.mark.parametrize("end", ["commit", "release", "close", "idle close"])
async def test_rows_go_with_the_end_of_the_turn(store: Store, end: str) -> None:
    fence = await claimed(store)
    if end == "commit":
        done = msgspec.structs.replace(commit("s", fence, store.me), stages="session")
        assert isinstance(await store.submit(done), Appended)
    elif end == "close":
        await store.close("s")
    else:
        kept = msgspec.structs.replace(release("s", fence, store.me), keeps_staged=end == "idle close")
        assert isinstance(await store.submit(kept), Appended)
    if end == "idle close":
        assert await rows(store) == [(2, 0), (2, 1)]
        assert isinstance(await store.submit(Close("s", 9.0, "idle", idle_since=9.0)), Appended)
    assert await rows(store) == []
    assert await stage(store, fence, 2) == [False]


async def test_a_dead_turns_rows_are_taken_over_once(store: Store) -> None:
    fence = await died(store)
    found = await left(store)
    assert (found.fence, found.rows) == (fence, [row(0), row(1)])
    assert await left(store, "b" * 64) is None
    session = await store.session("s")
    assert session is not None
    head = session.version
    await store.claim("s", head)
    take_over = TakeOverStaged("s", head + 1, store.me, CLAIMED_AT, fence)
    assert await store.submit(msgspec.structs.replace(take_over, fence=head)) is False
    assert [await store.submit(take_over), await store.submit(take_over)] == [True, False]
    assert await rows(store) == [(head + 1, 0), (head + 1, 1)]
    assert await stage(store, head + 1, 2) == [True]
    await store.submit(DropStaged("s", head + 1, store.me, CLAIMED_AT))
    assert await rows(store) == []


async def test_rows_that_cannot_be_continued_are_dropped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_request_hash", lambda turn, call: REQUEST)
    await died(store)
    await store.claim("s", 3)
    flight, opened, none = SimpleNamespace(session_id="s"), SimpleNamespace(turn=2), cast(Any, None)
    turn = SimpleNamespace(flight=flight, opened=opened, fence=4, incarnation=store.me, opened_at=CLAIMED_AT)
    settings, counters = Settings.model_construct(stage_tokens_s=0.0), StagingCounters()
    again = StagedTurn(cast(Any, turn), none, store.database, store.writer, settings, counters, is_native=False)
    assert await again.restore() == []
    assert await rows(store) == []
