"""What each operation on an affinity promises, on both databases."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers.store import LEASE_S, Store, add_incarnation, end_incarnation
from sqlalchemy import select, update

from app.domain.control import Action, SessionControl
from app.features.session_control import affinities
from app.features.session_control.affinities import (
    End,
    EndDue,
    Ending,
    EndOf,
    EngineTold,
    Move,
    Moved,
    NotOpened,
    Opened,
    Slide,
    Use,
    Used,
)
from app.features.session_control.affinities import affinities as table
from app.store.dialect import now
from app.store.schema import sessions
from app.store.writer import Writer

pytestmark = pytest.mark.anyio

A, B = "http://a:1", "http://b:1"
BOTH = frozenset({A, B})
NONE: frozenset[str] = frozenset()


class Names:
    """One process's turns on the name `c`."""

    def __init__(self, store: Store, me: int) -> None:
        self.store = store
        self.me = me

    async def use(
        self, action: Action | None = None, *, by: str = "s", at: str = A, holding: frozenset[str] = BOTH, **kw: Any
    ) -> Used:
        return await self.store.submit(Use(SessionControl("c", action, **kw), by, self.me, LEASE_S, at, holding))

    async def opened(self, by: str = "s", worker_session: bool = True) -> bool:
        return await self.store.submit(Opened("c", by, self.me, worker_session))

    async def open(self, by: str = "s", **kw: Any) -> None:
        assert (await self.use("open", by=by, **kw)).state == "opening"
        assert await self.opened(by)

    async def end(self, by: str = "s") -> Ending | None:
        return await self.store.submit(End("c", by, self.me))

    async def move(self, to: str, by: str = "s", holding: frozenset[str] = BOTH) -> Moved | None:
        return await self.store.submit(Move("c", by, self.me, A, to, holding))

    async def end_due(self, in_use: frozenset[str] = NONE) -> list[Ending]:
        return await self.store.submit(EndDue(self.me, LEASE_S, in_use))

    async def row(self) -> tuple[str, str, bool] | None:
        """State, engine, whether the engine has a session of its own."""
        query = select(table.c.state, table.c.engine, table.c.worker_session).where(table.c.control_id == "c")
        row = await self.store.database.read(lambda connection: connection.execute(query).first())
        return None if row is None else (row[0], row[1], row[2])

    async def left_s(self) -> float:
        query = select(table.c.expires_at - now()).where(table.c.control_id == "c")
        found = await self.store.database.read(lambda connection: connection.execute(query).scalar())
        assert found is not None
        return float(found)

    async def expire(self) -> None:
        late = update(table).where(table.c.control_id == "c").values(expires_at=now() - 1)
        await self.store.database.write(lambda tx: tx.run(late, {}), durable=False)


@pytest.fixture
def names(store: Store) -> Names:
    return Names(store, store.me)


@pytest.fixture
async def others(store: Store) -> Names:
    """Another process."""
    return Names(store, await add_incarnation(store.database))


async def test_a_name_that_nobody_bound_is_unbound(names: Names) -> None:
    assert await names.use() == Used("unbound")
    assert await names.use("close") == Used("unbound")
    assert await names.row() is None


async def test_open_is_bound_only_once_the_engine_has_opened(names: Names) -> None:
    assert await names.use("open", timeout_s=20) == Used("opening", A, 20)
    assert await names.row() == ("opening", A, True)
    assert await names.opened()
    assert await names.use() == Used("bound", A, 20)


async def test_an_engine_that_does_not_hold_sessions_is_bound_at_once(names: Names) -> None:
    assert (await names.use("open", holding=NONE)).state == "bound"
    assert await names.row() == ("bound", A, False)


async def test_bind_opens_nothing_and_open_does_so_later_at_the_same_engine(names: Names) -> None:
    assert (await names.use("bind", at=A)).state == "bound"
    assert await names.use("open", at=B) == Used("opening", A, 300)
    assert await names.opened()
    assert (await names.use("open", at=B)).state == "bound"


async def test_an_open_that_fails_leaves_no_binding(names: Names) -> None:
    await names.use("open")
    await names.store.submit(NotOpened("c", "s", names.me))
    assert await names.row() is None


async def test_while_one_opens_all_others_wait_and_then_go_to_its_engine(names: Names, others: Names) -> None:
    assert (await names.use("open", by="one", at=A)).state == "opening"
    for action in (None, "open", "bind", "close"):
        assert await others.use(action, by="two", at=B) == Used("held")  # type: ignore[arg-type]
    assert not await others.opened("two")
    assert await names.opened("one")
    assert (await others.use("open", by="two", at=B)).engine == A


async def test_two_first_opens_at_the_same_moment_make_one_binding(names: Names, others: Names) -> None:
    writers = [Writer(names.store.database), Writer(names.store.database)]
    for writer in writers:
        writer.start()
    wishes = [
        Use(SessionControl(f"c{number}", "open"), f"s{one.me}", one.me, LEASE_S, engine, BOTH)
        for number in range(8)
        for one, engine in ((names, A), (others, B))
    ]
    found = await asyncio.gather(*(writers[place % 2].submit(wish) for place, wish in enumerate(wishes)))
    for writer in writers:
        await writer.stop()
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert sorted([first.state, second.state]) == ["held", "opening"]


async def test_what_a_dead_process_was_opening_is_ended_before_it_is_opened_anew(names: Names, others: Names) -> None:
    await names.use("open", by="one", at=A)
    await end_incarnation(names.store.database, names.me)
    assert await others.use(by="two") == Used("unbound")
    assert await others.use("open", by="two", at=B) == Used("ending", A)
    assert await names.use("open", by="three") == Used("held")
    await others.store.submit(EngineTold("c", others.me))
    assert await others.use("open", by="two", at=B) == Used("opening", B, 300)
    assert not await names.opened("one")


async def test_close_unbinds_at_once_and_is_told_when_the_turn_has_ended(names: Names, others: Names) -> None:
    await names.open()
    assert (await names.use("close")).state == "closing"
    assert await others.use(by="two") == Used("unbound")
    assert await others.use("close", by="two") == Used("unbound")
    assert await others.end("two") is None
    assert await names.end() == Ending("c", A)
    assert await names.end() is None
    assert await others.use("open", by="two") == Used("held")
    await names.store.submit(EngineTold("c", names.me))
    assert await names.row() is None


async def test_close_of_what_the_engine_does_not_hold_needs_no_word(names: Names) -> None:
    await names.use("bind")
    assert await names.use("close") == Used("released", A)
    assert await names.row() is None


async def test_a_sessions_own_next_turn_waits_until_the_engine_has_been_told(names: Names, others: Names) -> None:
    await names.open()
    await names.use("close")
    assert await others.use("open") == Used("held")
    await end_incarnation(names.store.database, names.me)
    assert await others.use("open") == Used("ending", A)


async def test_while_a_closing_turn_runs_another_session_may_take_the_name_over(names: Names, others: Names) -> None:
    await names.open()
    await names.use("close")
    assert (await others.use("open", by="two", at=B)).engine == A
    assert await names.end() is None
    assert await names.row() == ("bound", A, True)


@pytest.mark.parametrize("action", [None, "open", "bind"])
async def test_each_use_slides_the_time_to_live(names: Names, action: Action | None) -> None:
    await names.use("bind", timeout_s=20)
    await names.use(action, timeout_s=600, holding=NONE)
    assert await names.left_s() > 500
    await names.use()
    assert await names.left_s() > 500


async def test_a_running_turn_slides_it_too(names: Names) -> None:
    await names.use("bind", timeout_s=600)
    await names.expire()
    await names.store.submit(Slide(["c"]))
    assert await names.left_s() > 500


async def test_what_has_expired_is_ended_once(names: Names, others: Names) -> None:
    await names.open()
    assert await others.end_due() == []
    await names.expire()
    assert await names.end_due(frozenset({"c"})) == []
    ended = await asyncio.gather(names.end_due(), others.end_due())
    assert sorted(ended, key=len) == [[], [Ending("c", A)]]
    assert await names.row() == ("ending", A, True)


async def test_what_has_expired_and_holds_nothing_is_gone(names: Names) -> None:
    await names.use("bind")
    await names.expire()
    assert await names.use() == Used("unbound")
    assert await names.end_due() == []
    assert await names.row() is None


async def test_an_expired_name_is_ended_before_it_is_opened_anew(names: Names) -> None:
    await names.open()
    await names.expire()
    assert await names.use() == Used("unbound")
    assert await names.use("open", at=B) == Used("ending", A)
    await names.store.submit(EngineTold("c", names.me))
    assert (await names.use("open", at=B)).engine == B


@pytest.mark.parametrize("action", ["open", "close"])
async def test_what_a_dead_process_had_at_work_is_ended_once(names: Names, others: Names, action: Action) -> None:
    if action == "close":
        await names.open()
    await names.use(action)
    assert await others.end_due() == []
    await end_incarnation(names.store.database, names.me)
    assert await others.end_due() == [Ending("c", A)]
    assert await others.end_due(frozenset({"c"})) == []


async def test_who_dies_while_it_tells_an_engine_is_replaced(names: Names, others: Names) -> None:
    await names.open()
    await names.expire()
    assert await names.end_due() == [Ending("c", A)]
    await end_incarnation(names.store.database, names.me)
    assert await others.end_due() == [Ending("c", A)]
    await names.store.submit(EngineTold("c", names.me))
    assert await others.row() == ("ending", A, True)


async def test_what_a_process_could_not_finish_itself_it_ends_later(names: Names) -> None:
    await names.open()
    await names.use("close")
    assert await names.end_due(frozenset({"c"})) == []
    assert await names.end_due() == [Ending("c", A)]


async def test_a_binding_survives_the_process_that_made_it(names: Names, others: Names) -> None:
    await names.open()
    await end_incarnation(names.store.database, names.me)
    assert await others.end_due() == []
    assert (await others.use(by="two")).engine == A


async def test_a_lost_engine_is_replaced_once(names: Names, others: Names) -> None:
    await names.open()
    assert await names.move(B, by="one") == Moved(opening=True, left=True)
    assert await others.move(B, by="two") is None
    assert await names.opened("one")
    assert await names.row() == ("bound", B, True)


async def test_a_lost_engine_is_replaced_by_one_that_holds_nothing(names: Names) -> None:
    await names.open()
    assert await names.move(B, holding=NONE) == Moved(opening=False, left=True)
    assert await names.row() == ("bound", B, False)


async def test_an_engine_that_is_lost_before_it_opened_has_nothing_left_there(names: Names) -> None:
    await names.use("open")
    assert await names.move(B) == Moved(opening=True, left=False)


async def test_a_closed_session_ends_what_it_used_last(names: Names, others: Names) -> None:
    await names.open(by="one")
    await names.use(by="two")
    assert await names.store.submit(EndOf("one", names.me)) == []
    assert not await names.store.database.read(lambda connection: affinities.used_last_by(connection, "one"))
    assert await names.store.database.read(lambda connection: affinities.used_last_by(connection, "two"))
    assert await others.store.submit(EndOf("two", others.me)) == [Ending("c", A)]


async def test_a_close_after_a_restore_is_told_once_more(names: Names) -> None:
    """The engine has not answered the first close: its row is `ending` still, or again."""
    database = names.store.database
    await names.store.create("s")
    engine = update(sessions).where(sessions.c.session_id == "s")

    async def close(at: str) -> None:
        await database.write(lambda tx: tx.run(engine.values(engine=at), {}), durable=False)
        await database.write(lambda tx: affinities.end_at_engine(tx, "s", "c"), durable=False)

    await close(A)
    await close(A)
    assert await names.end_due() == [Ending("c", A)]
    await close(B)
    await names.store.submit(EngineTold("c", names.me))
    assert await names.end_due(frozenset({"c"})) == [], "the first is being told"
    assert await names.end_due() == [Ending("c", B)]
    await names.store.submit(EngineTold("c", names.me))
    assert await names.row() is None


async def test_only_what_is_due_is_looked_at(names: Names) -> None:
    await names.open()
    look = lambda connection: affinities.due(connection, LEASE_S)  # noqa: E731
    assert await names.store.database.read(look) == []
    await names.expire()
    assert [row.control_id for row in await names.store.database.read(look)] == ["c"]
