"""What else happens to a session while it leaves for a file, and while it comes back."""

from __future__ import annotations

import asyncio

import pytest
from helpers.databases import connected
from helpers.store import Store
from sqlalchemy import Connection, event, select, text

from app.features.archive.rows import LEASE, Forget, Line, Reserve, unfinished
from app.store.feed import last_forgotten
from app.store.incarnations import TakeLease
from app.store.schema import events

pytestmark = pytest.mark.anyio
pytest.importorskip("pyarrow")


async def test_of_two_rollouts_that_leave_at_once_the_log_ends_where_the_later_did(postgres_store: Store) -> None:
    store, file = postgres_store, "file:///archive"
    for name in ("earlier", "later"):
        await store.create(name)
        await store.close(name)
    end = await store.horizon()
    fence = await store.submit(TakeLease(LEASE, store.me, 60.0, 60.0))
    await store.submit(Reserve(fence, file, [Line(name, name, None, None, None, b"") for name in ("earlier", "later")]))

    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )

    async def waiters(number: int, other: asyncio.Task[object] | None = None) -> None:
        async with asyncio.timeout(60):
            while await store.database.read(lambda c: c.execute(waiting).scalar_one()) < number:
                if other is not None and other.done():
                    return
                await asyncio.sleep(0.01)

    async with connected(store.database.url) as connection, asyncio.TaskGroup() as leaving, connection.begin():
        await connection.execute(select(events).where(events.c.session_id == "earlier").with_for_update())
        leaving.create_task(store.submit(Forget("earlier", fence, file, {"earlier": 2})))
        await waiters(1)  # It has read where the log ends, if nothing keeps it from that.
        later = leaving.create_task(store.submit(Forget("later", fence, file, {"later": 2})))
        await waiters(2, later)
    assert await store.database.read(last_forgotten) == end


async def test_the_look_for_what_is_left_to_do_does_not_read_the_whole_index(sqlite_store: Store) -> None:
    seen: list[str] = []

    def planned(connection: Connection) -> list[str]:
        event.listen(connection, "before_cursor_execute", lambda *given: seen.append(given[2]))
        unfinished(connection, most=1)
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {seen[-1]}", (1, 0))
        return [row[3] for row in plan]

    assert "USING INDEX ix_archived_state" in (await sqlite_store.database.read(planned))[0]
