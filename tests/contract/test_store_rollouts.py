"""Rollouts: which root a session has, and what a crash left of a root's close and reward; on both databases."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from helpers.databases import connected
from helpers.log import created
from helpers.store import Store, reward
from sqlalchemy import select, update

from app.domain.events import SessionClosed
from app.store import repair, rollouts
from app.store.dialect import CoreReads
from app.store.log import Appended, Refused
from app.store.log_sessions import Close, Create, JoinRollout, ShareReward
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


async def test_a_line_has_one_root_in_whatever_order_it_is_created(store: Store) -> None:
    expected: dict[str, str | None] = {}
    for number, order in enumerate(itertools.permutations(LINE)):
        for name in order:
            parent = LINE[name] and f"{LINE[name]}-{number}"
            assert isinstance(await store.submit(child(f"{name}-{number}", parent)), Appended)
        expected |= {f"{name}-{number}": LINE[name] and f"root-{number}" for name in LINE}
    assert await roots(store) == expected
    assert (await verify(store.database)).problems == []


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


async def test_whoever_shares_last_shares_the_last_reward(store: Store) -> None:
    """Two who have rewarded the root, in this order, come to its child in the other."""
    await store.submit(child("root", None))
    await store.submit(child("agent", "root"))
    await store.submit(reward("root", 1.0))
    await store.submit(reward("root", 2.0))
    for _ in range(2):
        await store.submit(ShareReward("agent", 5.0))
    assert (await store.head("agent")).reward == 2.0  # type: ignore[union-attr]


async def test_a_session_that_was_there_before_its_root_is_an_evaluation_as_it_is(store: Store) -> None:
    await store.submit(child("agent", "root"))
    outcome = await store.submit(Create("root", 2.0, created(evaluation=True), None))
    assert outcome.adopted == ("agent",)
    await store.submit(JoinRollout("agent", 3.0))
    head, session = await store.head("agent"), await store.session("agent")
    assert head is not None
    assert session is not None
    assert (head.evaluation, session.config.evaluation) == (True, True)
    assert (await verify(store.database)).problems == []


async def test_a_session_of_another_run_is_no_member_of_its_parents_rollout(store: Store, database_url: str) -> None:
    """Two transactions that make both at the same moment do not see each other."""
    await store.submit(Create("root", 1.0, created(run="one"), None))
    await store.submit(Create("agent", 1.0, created(run="two", parent="gone"), None))
    async with connected(database_url, writes=True) as connection:
        await connection.execute(update(sessions).where(sessions.c.session_id == "agent").values(root_id="root"))
    members: Any = await store.database.read(lambda c: rollouts.members(c, ["root"], status=("open",)))
    own = select(sessions.c.session_id).where(sessions.c.run == "two", rollouts.is_root())
    assert (members, await store.database.read(lambda c: c.execute(own).scalars().all())) == ([], ["agent"])
