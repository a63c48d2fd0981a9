"""Rollouts: which root a session has, what a group counts, what follows from a root's close and reward; on both."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from helpers.log import created
from helpers.store import Store, reward
from sqlalchemy import select

from app.domain.events import RewardAssigned, SessionClosed
from app.store import repair, rollouts
from app.store.dialect import CoreReads
from app.store.log import Appended, Refused
from app.store.log_sessions import Circular, Close, Create, ShareReward
from app.store.ports import Connection
from app.store.schema import sessions
from app.store.sessions import idle_sessions
from ops.verify import verify

pytestmark = pytest.mark.anyio


def child(session_id: str, parent: str | None, group_id: str | None = None, at: float = 1.0) -> Create:
    return Create(session_id, at, created(group_id=group_id, parent=parent), None)


async def roots(store: Store) -> dict[str, str | None]:
    """As stored, which must be as the logs say."""

    def read(connection: Connection) -> dict[str, str | None]:
        found = {row[0]: row[1] for row in connection.execute(select(sessions.c.session_id, sessions.c.root_id))}
        for session_id, root_id in found.items():
            log = repair.read_log(CoreReads(connection), session_id)
            assert log is not None
            assert log.root_id == root_id, session_id
        return found

    return await store.database.read(read)


LINE = {"root": None, "agent": "root", "sub": "agent", "deep": "sub"}


@pytest.mark.parametrize("order", list(itertools.permutations(LINE)), ids="-".join)
async def test_a_line_has_one_root_in_whatever_order_it_is_created(store: Store, order: tuple[str, ...]) -> None:
    for session_id in order:
        assert isinstance(await store.submit(child(session_id, LINE[session_id])), Appended)
        await roots(store)
    assert await roots(store) == {"root": None, "agent": "root", "sub": "root", "deep": "root"}
    assert (await verify(store.database)).problems == []


@pytest.mark.parametrize("line", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "a"}])
async def test_a_line_does_not_come_back_to_where_it_began(store: Store, line: dict[str, str]) -> None:
    *first, last = line
    for session_id in first:
        assert isinstance(await store.submit(child(session_id, line[session_id])), Appended)
    assert isinstance(await store.submit(child(last, line[last])), Circular)
    assert await store.head(last) is None
    assert (await verify(store.database)).problems == []


async def test_a_roots_reward_comes_before_a_childs_own(store: Store) -> None:
    await store.submit(child("root", None))
    await store.submit(child("agent", "root"))
    assert await store.submit(ShareReward("agent", 2.0)) == Appended(()), "the root has none"
    await store.submit(reward("agent", 0.25))
    assert (await store.head("agent")).reward == 0.25  # type: ignore[union-attr]
    await store.submit(reward("root", 1.0))
    shared = await store.submit(ShareReward("agent", 3.0))
    assert [one.event for one in shared.events] == [RewardAssigned(1.0, {}, of_root=True)]
    assert await store.submit(ShareReward("agent", 4.0)) == Appended(()), "it stands there"
    await store.submit(reward("agent", 0.5))
    await store.head_equals_fold("agent")
    session = await store.session("agent")
    assert session is not None
    assert session.reward is not None
    assert (session.reward.reward, session.has_roots_reward) == (1.0, True)
    assert await store.submit(ShareReward("root", 5.0)) == Appended(())


async def test_whoever_shares_last_shares_the_last_reward(store: Store) -> None:
    """Two who have rewarded the root, in this order, come to its child in the other."""
    await store.submit(child("root", None))
    await store.submit(child("agent", "root"))
    await store.submit(reward("root", 1.0))
    await store.submit(reward("root", 2.0))
    for _ in range(2):
        await store.submit(ShareReward("agent", 5.0))
    assert (await store.head("agent")).reward == 2.0  # type: ignore[union-attr]


async def test_what_a_crash_left_open_or_unrewarded_is_found(store: Store) -> None:
    for name, parent in (("root", None), ("agent", "root"), ("other", None), ("theirs", "other"), ("orphan", "gone")):
        await store.submit(child(name, parent))
    await store.close("root")
    await store.submit(reward("root", 1.0))

    async def found() -> tuple[list[str], list[str]]:
        left = await store.database.read(
            lambda c: (rollouts.outliving(c, ("", ""), 10), rollouts.without_roots_reward(c, ("", ""), 10))
        )
        behind = await store.database.read(lambda c: rollouts.outliving(c, ("root", "agent"), 10))
        assert behind == []
        return [name for _, name in left[0]], [name for _, name in left[1]]

    assert await found() == (["agent"], ["agent"])
    closed = await store.submit(Close("agent", 5.0, reason="root"))
    assert closed.events[-1].event == SessionClosed("root")
    assert await found() == ([], ["agent"])
    await store.submit(ShareReward("agent", 6.0))
    assert await found() == ([], [])


async def test_a_rollout_is_idle_as_a_whole(store: Store) -> None:
    """A root that waits for its agents is not."""
    await store.submit(child("root", None))
    await store.submit(child("agent", "root", at=7.0))
    idle: Any = await store.database.read(lambda c: idle_sessions(c, 5.0, "", 10))
    assert idle == []
    assert await store.submit(Close("root", 9.0, "idle", idle_since=5.0)) == Refused("open")
    assert await store.database.read(lambda c: idle_sessions(c, 8.0, "", 10)) == ["agent", "root"]
    await store.claim("agent", 1)
    assert await store.submit(Close("root", 9.0, "idle", idle_since=8.0)) == Refused("open")
    await store.release("agent", 2)
    await store.submit(Close("agent", 4.0))
    assert isinstance(await store.submit(Close("root", 9.0, "idle", idle_since=8.0)), Appended)
