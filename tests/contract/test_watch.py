"""Those who watch the list of sessions hear of every change, once, however slow they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from helpers.log import BODY
from helpers.store import Store, engines_at, reward
from sqlalchemy import insert, update

from app.errors import InvalidRequest, Overloaded
from app.features.page import watch as watching
from app.features.page.watch import Listener, Watch
from app.sessions.log_end import LogEnd
from app.sessions.session_list import SessionList
from app.store.database import Database
from app.store.dialect import Tx
from app.store.schema import events, sessions, store_meta
from turnlog.replies import ListedSession

pytestmark = pytest.mark.anyio

PATIENCE_S = 20.0


class Watched:
    """A store that is watched; `held` are the sessions at a gate."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.held: dict[str, bool] = {}
        listed = SessionList(store.database, self._at_gates, engines_at(), lambda: 0.0)
        self.watch = Watch(store.database, listed, LogEnd(store.database, 0.01), poll_s=0.01)

    def _at_gates(self) -> dict[str, bool]:
        """Turns come and go on the event loop, so no thread of a read may look at them."""
        asyncio.get_running_loop()
        return self.held

    async def heads(self) -> dict[str, int]:
        """The versions of all sessions."""
        query = sessions.select().with_only_columns(sessions.c.session_id, sessions.c.version)
        rows = await self.store.database.read(lambda connection: list(connection.execute(query)))
        return {row[0]: row[1] for row in rows}

    async def heard(self, listener: Listener, expected: dict[str, int]) -> list[ListedSession]:
        """What is taken until each session's version is the expected one, in the order of taking."""
        taken: list[ListedSession] = []
        async with asyncio.timeout(PATIENCE_S):
            while {row["session_id"]: row["version"] for row in taken} != expected:
                await listener.wait(1.0)
                taken += listener.take()
        return taken

    async def told(self, listener: Listener) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not listener.has_changes:
                await listener.wait(1.0)


@pytest.fixture
async def watched(store: Store) -> AsyncIterator[Watched]:
    made = Watched(store)
    yield made
    made.watch.stop()


async def test_nothing_is_read_while_nobody_listens(watched: Watched) -> None:
    assert not watched.watch.is_running
    first, second = await watched.watch.listen(None), await watched.watch.listen(None)
    first.close()
    assert watched.watch.is_running
    second.close()
    assert not watched.watch.is_running
    again = await watched.watch.listen(None)
    await watched.store.create("a")
    await watched.heard(again, {"a": 1})
    again.close()


async def test_a_slow_listener_finds_each_session_once_as_it_is(watched: Watched) -> None:
    await watched.store.create("old")
    listener, quick = await watched.watch.listen(None), await watched.watch.listen(None)
    for name in ("a", "b"):
        await watched.store.create(name)
        for _ in range(3):
            await watched.store.take_turn(name)
    expected = {name: version for name, version in (await watched.heads()).items() if name != "old"}
    await watched.heard(quick, expected)
    rows = listener.take()
    assert {row["session_id"]: row["version"] for row in rows} == expected
    assert len(rows) == 2
    assert listener.cursor == quick.cursor
    for one in (listener, quick):
        one.close()


async def test_rows_that_were_read_earlier_never_replace_later_ones(watched: Watched) -> None:
    listener = await watched.watch.listen(None)
    await watched.store.create("a")
    await watched.told(listener)
    (old,) = listener.take()
    await watched.store.submit(reward("a", 1.0))
    await watched.told(listener)
    listener.add([old], listener.cursor)
    assert [row["version"] for row in listener.take()] == [2]
    listener.close()


async def test_who_missed_too_much_begins_anew(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_BEHIND", 3)
    first = await watched.watch.listen(None)
    await watched.store.create("a")
    await watched.told(first)
    cursor = first.cursor.encode()
    first.close()
    for name in ("b", "c", "d"):
        await watched.store.create(name)
    just = await watched.watch.listen(cursor)
    assert not just.take_reset()
    assert {row["session_id"] for row in just.take()} == {"b", "c", "d"}
    await watched.store.create("e")
    late = await watched.watch.listen(cursor)
    assert late.take_reset()
    assert late.cursor != late.start_cursor
    for one in (just, late):
        one.close()


async def test_a_cursor_of_a_store_that_was_restored_begins_anew(watched: Watched) -> None:
    await watched.store.create("a")
    listener = await watched.watch.listen(None)
    cursor = listener.cursor.encode()
    listener.close()
    raised = update(store_meta).where(store_meta.c.key == "epoch").values(value="another")
    await watched.store.database.write(lambda tx: tx.run(raised, {}), durable=True)
    again = await watched.watch.listen(cursor)
    assert again.take_reset()
    again.close()


async def test_a_log_that_lost_its_end_has_everybody_begin_anew(watched: Watched) -> None:
    """As after a crash of PostgreSQL that took back a claim, which is not synced."""
    await watched.store.create("a")
    listener = await watched.watch.listen(None)
    await watched.store.submit(reward("a", 1.0))
    await watched.heard(listener, {"a": 2})
    await watched.store.forget_event("a", 2)
    await watched.told(listener)
    assert listener.take_reset()
    assert not listener.take()
    await watched.store.create("b")
    await watched.heard(listener, {"b": 1})
    listener.close()


async def test_there_is_a_limit_and_an_end(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_LISTENERS", 2)
    listeners = [await watched.watch.listen(None) for _ in range(2)]
    with pytest.raises(Overloaded):
        await watched.watch.listen(None)
    listeners.pop().close()
    listeners.append(await watched.watch.listen(None))
    watched.watch.stop()
    for listener in listeners:
        await listener.wait(PATIENCE_S)
        assert listener.is_over
    with pytest.raises(Overloaded):
        await watched.watch.listen(None)
    for listener in listeners:
        listener.close()


async def test_what_is_no_cursor_is_refused_and_leaves_no_listener(watched: Watched) -> None:
    for cursor in ("", "x", "é", "WyIxIl0"):
        with pytest.raises(InvalidRequest):
            await watched.watch.listen(cursor)
    assert not watched.watch.is_running


async def test_much_at_once_is_told_in_several_reads(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "BATCH", 4)
    listener = await watched.watch.listen(None)
    await written_elsewhere(watched.store.database, 30)
    await watched.heard(listener, {f"s{number}": 1 for number in range(30)})
    listener.close()


async def written_elsewhere(database: Database, count: int) -> None:
    """So many sessions in one transaction, as another process may write them."""
    head = {"version": 1, "status": "open", "open_turns": 0, "turns": 0, "created_at": 1.0, "updated_at": 1.0}
    head["run"] = "default"
    heads = [{**head, "session_id": f"s{number}", "body_hash": BODY} for number in range(count)]
    event = {"seq": 1, "type": "SessionCreated", "version": 1, "at": 1.0, "data": b"{}"}
    log = [{**event, "session_id": f"s{number}"} for number in range(count)]
    if database.is_sqlite:
        log = [{**row, "position": number} for number, row in enumerate(log, 1)]

    def write(tx: Tx) -> None:
        tx.insert(insert(sessions), heads)
        tx.insert(insert(events), log)

    await database.write(write, durable=True)
