"""A store with a session in each state that a log can leave one in, and ways to look at it and to damage it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from helpers.databases import connected, database_at
from helpers.log import rolled_back
from helpers.store import Store, claim, create, end_incarnation, reward

from app.domain.events import BlobsTombstoned
from app.store.database import Database
from app.store.log_sessions import Close, FreeReplay
from turnlog.cli.commands import app_of


async def fill(database: Database) -> None:
    """A session in each state that a log can leave one in."""
    async with Store.over(database) as store:
        for name in ("Created", "waiting", "talked", "rejected", "cut", "idle", "freed", "erased"):
            await store.submit(create(name))
        await store.submit(claim("waiting", 1, store.me, retry_key="k" * 32))
        await store.take_turn("talked")
        await store.take_turn("talked")
        await store.submit(reward("talked", 0.25, 1))
        await store.submit(reward("talked", 0.5))
        await store.claim("talked", 7, turn=3, parent=1)
        await store.commit("talked", 8, turn=3, parent=1, before=[rolled_back(1, 2)])
        await store.submit(claim("rejected", 1, store.me))
        await store.release("rejected", 2)
        await store.submit(claim("cut", 1, store.me))
        await store.close("cut")
        await store.submit(Close("idle", 5.5, "idle", idle_since=100.0))
        await store.take_turn("freed")
        await store.close("freed")
        await store.submit(FreeReplay("freed", 4, 7.0, BlobsTombstoned((1,), ())))
        await store.take_turn("erased")
        await store.close("erased")
        await store.erase("erased")
        await end_incarnation(database, store.me)


async def opened(url: str, function: Callable[[Database], Any]) -> Any:
    async with database_at(url) as database:
        return await function(database)


def execute(url: str, statement: str) -> None:
    async def run() -> None:
        async with connected(url, writes=True) as connection:
            await connection.exec_driver_sql(statement)

    asyncio.run(run())


def replay(arguments: list[str]) -> int:
    """The exit code of `turnlog replay`."""
    try:
        app_of("replay")(["replay", *arguments], prog_name="turnlog")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
