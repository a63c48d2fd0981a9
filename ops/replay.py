"""`turnlog replay`: a session's state after any of its events as JSON, or the heads table compared with the log.

Everything but `fix` only reads and may run beside a server. Exit code 1 also where the session or event does not exist
or cannot be read, and where differences are left.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from app.composition import store_points
from app.errors import InvalidRequest, SessionNotFound, SessionUnreadable
from app.sessions.event_log import described, event_fields
from app.sessions.session_at import session_at
from app.settings import Settings
from app.store.database import Database
from app.store.repair import Examined, examined, mended, refuse_if_served, require_revision
from ops.store_command import DONE, NOT_ALL_WELL, CommandResult, Progress, require_store, run, settings_for


def replay(
    database_url: str | None, session: str | None, seq: int | None, *, with_events: bool, fix: bool, as_json: bool
) -> int:
    """Run the command and return its exit code. `session` None: compare the heads of all sessions with their logs;
    `fix`: write what those say. `database_url`: None for the store of the service's settings."""

    def work() -> CommandResult:
        # `fix` needs the lease: on PostgreSQL it decides whether a server is alive.
        settings = settings_for(database_url, *(["lease_s"] if fix else []))
        if session is None:
            return asyncio.run(_heads(settings, fix=fix, as_json=as_json))
        return asyncio.run(_state(settings, session, seq, with_events=with_events, as_json=as_json))

    return run("replay", work, interrupted="sessions reported as fixed are fixed, run it again for the others")


@asynccontextmanager
async def _store(settings: Settings, *, fixing: bool = False) -> AsyncIterator[Database]:
    """The database. With `fixing` it is opened for writing; no server may use it. Raises StartupError."""
    require_store(settings.database_url)
    database = Database(settings.database_url, points=store_points())
    try:
        if fixing:
            await database.open()
            await refuse_if_served(database, settings.lease_s)
        else:
            await require_revision(database)
        yield database
    finally:
        await database.close()


async def _state(
    settings: Settings, session_id: str, seq: int | None, *, with_events: bool, as_json: bool
) -> CommandResult:
    async with _store(settings) as database:
        try:
            session_state = await session_at(database, session_id, seq, whole=True)
            state = described(session_state.session)
            if with_events:
                state["events"] = [event_fields(recorded) for recorded in session_state.events]
        except (SessionNotFound, InvalidRequest, SessionUnreadable) as error:
            print(f"replay: {error}", file=sys.stderr)
            return CommandResult(NOT_ALL_WELL, [], {})
    return CommandResult(DONE, [_json(state) if as_json else msgspec.json.format(_json(state))], {})


async def _heads(settings: Settings, *, fix: bool, as_json: bool) -> CommandResult:
    seen = differing = fixed = left = 0
    progress = Progress("replay")
    async with _store(settings, fixing=fix) as database:
        async for one in examined(database):
            seen += 1
            differing += len(one.differences) + (one.unreadable is not None)
            mends = fix and one.mendable
            result = await mended(database, one.session_id) if mends else one
            if not one.sound:
                fixed += mends
                left += not mends
                _report(result, fixed=mends, as_json=as_json)
            progress(f"{seen} sessions, at {one.session_id}")
    summary = f"sessions: {seen}, differences: {differing}"
    print(f"{summary}, fixed: {fixed}, left: {left}" if fix else summary, file=sys.stderr)
    return CommandResult(NOT_ALL_WELL if left else DONE, [], {})


def _report(one: Examined, *, fixed: bool, as_json: bool) -> None:
    """Print a session's differences at once, so that an interrupted run has reported what it did."""
    say = partial(print, flush=True)
    for difference in one.differences:
        told = f"{one.session_id}: {difference}{': fixed' if fixed else ''}"
        say(_json({**msgspec.structs.asdict(difference), "fixed": fixed}) if as_json else told)
    if one.unreadable is not None:
        fields = {"session_id": one.session_id, "unreadable": one.unreadable, "fixed": False}
        say(_json(fields) if as_json else f"{one.session_id}: the log cannot be read: {one.unreadable}")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
