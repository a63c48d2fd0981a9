"""Checks that the store holds what its log says: `turnlog verify`.

The log is the truth: all other stored data is compared with a fold of it. The check writes nothing and takes no lock,
so a server may run. Each session and each page of groups is read as a consistent state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial

import msgspec
from sqlalchemy import Connection

from app.domain.events import ChunkRef
from app.errors import StoreDamaged
from app.features.objects.bucket import open_bucket
from app.settings import load_settings
from app.store import repair
from app.store.content import live_objects, load_chunks
from app.store.damage import PageDamaged, attempt
from app.store.database import Database
from app.store.dialect import StorePoints
from app.store.sessions import readable_ids
from ops.store_command import DONE, NOT_ALL_WELL, CommandResult, Progress, require_store, run, settings_for, silent
from ops.verify import acknowledged as acknowledged_turns
from ops.verify.fleet import check_fleet
from ops.verify.report import STORE, Acknowledged, Problem, Report
from ops.verify.session import PAGE, TABLES, SessionCheck, check_damaged, chunk_fault
from ops.verify.whole import check_file, check_groups, check_order
from turnlog.amounts import amount

__all__ = ["STORE", "TABLES", "Acknowledged", "Problem", "Report", "perform", "verify", "verify_url"]


async def verify(
    database: Database, acknowledged: Iterable[Acknowledged] = (), progress: Callable[[str], None] = silent
) -> Report:
    """Check every session of a database, and the data that belongs to no session. The database need not be open.

    The `acknowledged` turns must be in the log, with the reply that the client received. `progress` is called with the
    progress. Raises AppError if the store cannot be read.
    """
    report = Report()
    async for session_id in _session_ids(database, report):
        part, in_objects = await database.read(partial(_check_session, session_id=session_id), one_moment=True)
        report.add(part)
        await _check_objects(database, session_id, in_objects, report)
        progress(f"{amount(report.sessions, 'session')}, {amount(len(report.problems), 'problem')}, at {session_id}")
    await acknowledged_turns.check(database, acknowledged, report, progress)
    progress("the file")
    await check_file(database, report)
    for what, check in (("order of events", check_order), ("groups", check_groups), ("log of the fleet", check_fleet)):
        try:
            await check(database, report, progress)
        except StoreDamaged as error:
            report.found(STORE, f"the check of the {what} was not finished: {error}")
    return report


async def _session_ids(database: Database, report: Report) -> AsyncIterator[str]:
    """All session ids in order. If the pages that list them are damaged, also the ids that other tables name."""
    seen: set[str] = set()
    after = ""
    try:
        while ids := await database.read(partial(repair.session_ids, tables=TABLES, after=after, limit=PAGE)):
            for session_id in ids:
                if session_id in seen:
                    raise StoreDamaged(f"session {session_id} is listed twice")
                seen.add(session_id)
                yield session_id
            after = ids[-1]
    except StoreDamaged as error:
        report.found(STORE, f"the sessions cannot be listed, only the known ones are checked: {error}")
    else:
        return
    for session_id in await database.read(partial(readable_ids, tables=TABLES)):
        if session_id not in seen:
            yield session_id


def _check_session(connection: Connection, session_id: str) -> tuple[Report, list[ChunkRef]]:
    part = Report()
    check = SessionCheck(connection, session_id, part)
    try:
        attempt(connection, lambda _: check.run())
    except PageDamaged:
        check_damaged(connection, session_id, part)
        return part, []
    return part, check.in_objects


async def _check_objects(database: Database, session_id: str, in_objects: Iterable[ChunkRef], report: Report) -> None:
    """Check the chunks in objects, one in memory at a time. One that was tombstoned since is well."""
    for ref in in_objects:
        frames = await load_chunks(database, session_id, [ref.key])
        fault = chunk_fault(ref, frames.get(ref.key))
        if fault is not None:
            live = await database.read(partial(live_objects, session_id=session_id, keys=[ref.key]))
            if live:
                report.found(session_id, fault)


async def verify_url(
    url: str, acknowledged: Iterable[Acknowledged] = (), progress: Callable[[str], None] = silent
) -> Report:
    """Run `verify` on the store at `url`. Raises AppError, StartupError if it cannot be read."""
    require_store(url)
    database = Database(url, bucket=open_bucket(load_settings("payloads", "payloads_timeout_s")), points=StorePoints())
    try:
        await repair.require_revision(database)
        return await verify(database, acknowledged, progress)
    finally:
        await database.close()


def perform(database_url: str | None, *, as_json: bool = False) -> int:
    """Run the command and return its exit code. `database_url`: None for the store of the service's settings."""
    return run("verify", lambda: _checked(database_url), interrupted="nothing was changed", as_json=as_json)


def _checked(database_url: str | None) -> CommandResult:
    report = asyncio.run(verify_url(settings_for(database_url).database_url, progress=Progress("verify")))
    lines = [
        *(f"{problem.session_id}: {problem.what}" for problem in report.problems),
        *report.damage(),
        report.summary(),
    ]
    return CommandResult(NOT_ALL_WELL if report.problems else DONE, lines, msgspec.to_builtins(report))
