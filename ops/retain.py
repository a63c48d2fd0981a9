"""Runs one round of the janitor with the service's settings: `turnlog retain` or `python -m ops.retain`.

Closes idle sessions (TURNLOG_IDLE_CLOSE_S), frees replay payloads (TURNLOG_CLOSED_REPLAY_TTL_S) and erases closed
sessions (TURNLOG_CLOSED_TTL_S). On SQLite no server may run; on PostgreSQL servers may. Each session is a separate
step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from app.sessions.cache import SessionCache
from app.sessions.erasure import Erasure
from app.sessions.followers import Followers
from app.sessions.janitor import REST_S, Janitor
from app.sessions.lifecycle import Sessions
from app.settings import Settings
from app.store import incarnations
from app.store.engine import Database
from app.store.log_turns import AbandonDead
from app.store.objects.bucket import open_bucket
from app.store.writer import Writer
from ops.keeping import DONE, CommandResult, Progress, require_store, run, run_as_turnlog, settings_for

LIMITS = ("idle_close_s", "closed_replay_ttl_s", "closed_ttl_s", "retain_until_ack")
PLACES = ("payloads", "payloads_timeout_s")

DEAD_AT_ONCE = 200
"""Open turns of ended processes that are abandoned in one transaction."""

POLL_S = 1.0

INTERRUPTED = "run it again to finish"


def perform(database_url: str | None, *, as_json: bool = False) -> int:
    """Run the command and return its exit code. If `database_url` is None, it uses the store from the service's
    settings."""
    return run("retain", lambda: asyncio.run(_retain(database_url)), interrupted=INTERRUPTED, as_json=as_json)


async def _retain(database_url: str | None) -> CommandResult:
    settings = settings_for(database_url, "lease_s", *LIMITS, *PLACES)
    require_store(settings.database_url)
    async with _janitor(settings) as janitor:
        await _run_round(janitor)
        return CommandResult(DONE, [str(janitor.done)], msgspec.to_builtins(janitor.done))


@asynccontextmanager
async def _janitor(settings: Settings) -> AsyncIterator[Janitor]:
    """The service's janitor. First it abandons the open turns of ended servers, which would make their sessions look in
    use."""
    database = Database(settings.database_url, bucket=open_bucket(settings))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(database.close)
        await database.open()
        writer = Writer(database)
        writer.start()
        stack.push_async_callback(writer.stop)
        await database.write(incarnations.end_gone, durable=False)
        # The SQLite lock proves that no other process runs, however recent its last heartbeat is.
        await _abandon_dead(writer, 0.0 if database.is_sqlite else settings.lease_s)
        cache = SessionCache(database, writer, settings.cache_bytes)
        stack.push_async_callback(cache.close)
        followers = Followers()
        sessions = Sessions(database, writer, cache, followers, time.time)
        erasure = Erasure(
            database=database,
            writer=writer,
            cache=cache,
            followers=followers,
            clock=time.time,
            sessions=sessions,
        )
        rest_s = 0.0 if database.is_sqlite else REST_S
        yield Janitor(database, writer, sessions, erasure, settings, time.time, rest_s=rest_s)


async def _abandon_dead(writer: Writer, lease_s: float) -> None:
    after: str | None = ""
    while after is not None:
        after, _ = await writer.submit(AbandonDead(after, DEAD_AT_ONCE, time.time(), lease_s))


async def _run_round(janitor: Janitor) -> None:
    """Run one round and report its progress."""
    progress = Progress("retain")
    round_ = asyncio.create_task(janitor.round())
    try:
        while not round_.done():
            await asyncio.wait([round_], timeout=POLL_S)
            progress(str(janitor.done))
        await round_
    finally:
        round_.cancel()


if __name__ == "__main__":
    run_as_turnlog("retain")
