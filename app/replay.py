"""`turnlog replay`: a session's state after any of its events as JSON, or the heads table compared with the log.

It opens the service's database. Everything but `fix` only reads and may run beside a server. Exit code 0: done, no
differences left; 1: the session or event does not exist or cannot be read, or differences are left; 2: the database
cannot be opened.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy.engine import make_url

from app.composition import store_points
from app.errors import AppError, InvalidRequest, SessionNotFound, SessionUnreadable, StartupError
from app.sessions.event_log import described, event_fields
from app.sessions.session_at import session_at
from app.settings import Settings, load_settings
from app.store.engine import Database
from app.store.repair import Examined, examined, mended, refuse_if_served, require_revision

PROGRESS_S = 5.0
"""Interval of progress lines in a long run."""

INTERRUPTED = 130


def run(session: str | None, seq: int | None, *, with_events: bool, fix: bool, as_json: bool) -> int:
    """The exit code. `session` None: compare the heads of all sessions with their logs; `fix`: write what those say."""
    try:
        settings = _settings(fixing=fix)
        work = (
            _heads(settings, fix=fix, as_json=as_json)
            if session is None
            else _state(settings, session, seq, with_events=with_events, as_json=as_json)
        )
        return asyncio.run(work)
    except (SessionNotFound, InvalidRequest, SessionUnreadable) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    except StartupError as error:
        print(error.under("replay"), file=sys.stderr)
        return 2
    except AppError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("replay: interrupted; sessions reported as fixed are fixed, run it again for the others", file=sys.stderr)
        return INTERRUPTED


def _settings(*, fixing: bool) -> Settings:
    """Only the settings that are needed, so that an error in another one does not stop the command.

    `--fix` needs the lease: on PostgreSQL it decides whether a server is alive.
    """
    return load_settings("database_url", *(["lease_s"] if fixing else []))


@asynccontextmanager
async def _store(settings: Settings, *, fixing: bool = False) -> AsyncIterator[Database]:
    """The database. With `fixing` it is opened for writing; no server may use it. Raises StartupError."""
    url = make_url(settings.database_url)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
        raise StartupError(f"there is no database {url.database}")
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


async def _state(settings: Settings, session_id: str, seq: int | None, *, with_events: bool, as_json: bool) -> int:
    async with _store(settings) as database:
        session_state = await session_at(database, session_id, seq, whole=True)
    state = described(session_state.session)
    if with_events:
        state["events"] = [event_fields(recorded) for recorded in session_state.events]
    print(_json(state) if as_json else msgspec.json.format(_json(state)))
    return 0


async def _heads(settings: Settings, *, fix: bool, as_json: bool) -> int:
    seen = differing = fixed = left = 0
    reported_at = time.monotonic()
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
            if time.monotonic() - reported_at > PROGRESS_S:
                reported_at = time.monotonic()
                print(f"replay: {seen} sessions, at {one.session_id}", file=sys.stderr)
    summary = f"sessions: {seen}, differences: {differing}"
    print(f"{summary}, fixed: {fixed}, left: {left}" if fix else summary, file=sys.stderr)
    return 1 if left else 0


def _report(one: Examined, *, fixed: bool, as_json: bool) -> None:
    """Print a session's differences at once, so that an interrupted run has reported what it did."""
    for difference in one.differences:
        if as_json:
            _print_json({**msgspec.structs.asdict(difference), "fixed": fixed})
        else:
            print(f"{one.session_id}: {difference}{': fixed' if fixed else ''}", flush=True)
    if one.unreadable is not None:
        if as_json:
            _print_json({"session_id": one.session_id, "unreadable": one.unreadable, "fixed": False})
        else:
            print(f"{one.session_id}: the log cannot be read: {one.unreadable}", flush=True)


def _print_json(value: Any) -> None:
    print(_json(value), flush=True)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
