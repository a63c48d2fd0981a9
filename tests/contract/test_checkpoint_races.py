"""What others do while the store is taken back to a checkpoint, and an erasure that was cut short."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
from helpers.log import BODY, created, payload
from helpers.store import Meanwhile, Store, reward
from sqlalchemy import true
from test_store_chunks import chunks

from app.domain.events import SessionConfig, SessionCreated, SessionRestored
from app.errors import NotFound, StoreUnavailable
from app.features.checkpoints.operations import Delete, DropRows, Make, RestoreSession
from app.features.checkpoints.restores import HEAD, Restores
from app.process import FeatureFaults
from app.sessions.cache import SessionCache
from app.sessions.erasure import Erasure
from app.sessions.event_log import Followers
from app.sessions.janitor import Janitor
from app.sessions.lifecycle import Sessions
from app.settings import Settings
from app.store.log_sessions import Close, Create, Erase, FreeReplay
from app.store.sessions import Acknowledgements
from app.store.writer import Writer

pytestmark = pytest.mark.anyio


def sessions_of(store: Store, writer: Writer) -> Sessions:
    cache = SessionCache(store.database, store.writer, 1 << 20)
    return Sessions(store.database, writer, cache, Followers(), time.time, FeatureFaults())


def erasure_of(store: Store, writer: Writer) -> Erasure:
    cache = SessionCache(store.database, store.writer, 1 << 20)
    return Erasure(
        database=store.database,
        writer=writer,
        cache=cache,
        followers=Followers(),
        clock=time.time,
        sessions=sessions_of(store, writer),
    )


def restores(store: Store, writer: Writer) -> Restores:
    return Restores(
        database=store.database,
        writer=writer,
        cache=SessionCache(store.database, store.writer, 1 << 20),
        followers=Followers(),
        sessions=sessions_of(store, store.writer),
        clock=time.time,
        then=(),
    )


async def test_nothing_is_taken_back_to_a_checkpoint_that_is_just_deleted(store: Store) -> None:
    await store.create("s")
    await store.take_turn("s")
    await store.submit(Make("default", "cut", "now"))
    deleted = Meanwhile(store.writer, Make, Delete("default", "cut"), DropRows("", 10))
    with pytest.raises(NotFound, match="no checkpoint cut"):
        await restores(store, deleted.as_writer).run("default", "cut", "before-1-cut")
    head = await store.head("s")
    assert head is not None
    assert (head.status, head.turns) == ("open", 1)
    await store.submit(Make("default", "cut", "now"))
    gone = Delete("default", "cut"), DropRows("", 10), DropRows("", 10)
    other = Meanwhile(store.writer, Make, *gone, Make("default", "cut", "now"))
    done = await restores(store, other.as_writer).run("default", "cut", "before-2-cut")
    assert done["undone"] == 0, "another checkpoint has its name now"


async def test_a_session_that_is_erased_meanwhile_was_not_taken_back(store: Store) -> None:
    await store.create("s")
    await store.submit(Make("default", "cut", "now"))
    erased = Meanwhile(store.writer, RestoreSession, Close("s", 5.0), Erase("s", 6.0))
    await store.take_turn("s")
    done = await restores(store, erased.as_writer).run("default", "cut", "before-1-cut")
    assert (done["sessions"], done["erased"]) == (0, ["s"])


async def test_a_checkpoint_has_what_would_be_freed_behind_an_acknowledgement(store: Store) -> None:
    await store.submit(Create("s", 1.0, created(group_id="g"), None))
    await store.take_turn("s", payloads=(payload(2, 0),), chunks=chunks(0))
    await store.close("s")
    made = Meanwhile(store.writer, FreeReplay, Make("default", "cut", "now"))
    erasure, sessions = erasure_of(store, made.as_writer), sessions_of(store, store.writer)
    groups = iter([[(1.0, "default", "g")], []])
    janitor = Janitor(store.database, store.writer, sessions, erasure, Settings(), time.time)
    await janitor._free_acknowledged(Acknowledgements(true(), lambda *_: next(groups)), 10.0)
    assert await store.chunks("s") == {(2, 0): (b"ab", None)}


class Sweeping:
    """The writer of a restore: behind each session that it takes back, another process finishes what it finds."""

    def __init__(self, store: Store) -> None:
        self._writer = store.writer
        self._sessions = sessions_of(store, store.writer)

    async def submit(self, operation: Any) -> Any:
        outcome = await self._writer.submit(operation)
        if isinstance(operation, RestoreSession):
            await self._sessions.finish_closing()
            await self._sessions.finish_rewarding()
        return outcome


async def test_a_session_whose_root_is_not_taken_back_yet_is_not_closed_or_rewarded_with_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.features.checkpoints.restores.AT_ONCE", 1)
    await store.create("root")
    config = SessionConfig(rollback_window=1, parent="root")
    await store.submit(Create("child", 1.0, SessionCreated(config, BODY, None), None))
    await store.submit(Make("default", "cut", "now"))
    sessions = sessions_of(store, store.writer)
    await sessions.assign_reward("root", 1.0, {}, None)
    await sessions.close("root")
    await restores(store, cast(Writer, Sweeping(store))).run("default", "cut", "before-1-cut")
    for session_id in ("root", "child"):
        head = await store.head(session_id)
        assert head is not None
        assert (head.status, head.reward) == ("open", None)


async def test_a_restore_of_a_run_shares_no_reward_in_another(store: Store) -> None:
    for run in ("a", "b"):
        for name, parent in ((run, None), (f"{run}-child", run)):
            config = SessionConfig(rollback_window=1, parent=parent, run=run)
            await store.submit(Create(name, 1.0, SessionCreated(config, BODY, None), None))
        await store.submit(reward(run, 1.0))
    await store.submit(Make("a", "cut", "now"))
    await restores(store, store.writer).run("a", "cut", "before-1-cut")
    heads = [await store.head(name) for name in ("a-child", "b-child")]
    assert [head.reward for head in heads if head is not None] == [1.0, None]


@pytest.mark.parametrize("child", [False, True])
async def test_an_erasure_wins_over_a_restore_that_opens_the_session_again(store: Store, child: bool) -> None:
    """It is taken back between its closing and its erasure."""
    await store.create("root")
    if child:
        config = SessionConfig(rollback_window=1, parent="root")
        await store.submit(Create("s", 1.0, SessionCreated(config, BODY, None), None))
    name = "s" if child else "root"
    head = dict.fromkeys(HEAD) | {
        "status": "open",
        "turns": 0,
        "spent_turns": 0,
        "spent_tokens": 0,
        "evaluation": False,
        "engine_errors": 0,
        "tool_errors": 0,
    }
    back = RestoreSession(name, 1, 2, 9.0, [SessionRestored("cut", 1)], head)
    writer = Meanwhile(store.writer, Erase, back)
    assert await erasure_of(store, writer.as_writer).erase("root")
    for session_id in {name, "root"}:
        found = await store.head(session_id)
        assert found is not None
        assert found.status == "erased"
    assert SessionRestored.__name__ in [type(one.event).__name__ for one in await store.log(name)]


async def test_what_could_not_be_forgotten_is_by_the_next_request(store: Store) -> None:
    """Also of a session of the rollout, which is erased already."""
    await store.create("root")
    config = SessionConfig(rollback_window=1, parent="root")
    await store.submit(Create("s", 1.0, SessionCreated(config, BODY, None), None))
    asked: list[str] = []

    async def forget(session_id: str) -> None:
        asked.append(session_id)
        if len(asked) == 1:
            raise StoreUnavailable("the search index is locked")

    erasure = erasure_of(store, store.writer)
    erasure.forget.append(forget)
    with pytest.raises(StoreUnavailable):
        await erasure.erase("root")
    assert await erasure.erase("root")
    assert asked == ["s", "s", "root"]
