"""What must hold of every process once nothing fails: what it knows and says of sessions is what the log says."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from sqlalchemy import select

from app.domain.events import name_of
from app.domain.groups import GroupKey
from app.domain.selection import Selection
from app.domain.session import Session, encode_session
from app.errors import AppError, SessionNotFound
from app.features.groups.feed import Groups
from app.features.groups.schema import groups
from app.sessions import event_log
from app.sessions.session_list import SessionQuery
from app.store import repair
from app.store.dialect import CoreReads
from app.store.repair import FoldedLog
from ops.verify import TABLES
from tests.tools.simulation.kept import lacks_text
from tests.tools.simulation.process import Disconnected, Process
from tests.tools.simulation.world import World

T = TypeVar("T")

ASKED = 0.3
"""How many schedules end with one process being asked for all that is there."""

AGAIN_S = 0.5
ALL = 1000

UNLISTED = frozenset(
    {"open_turns", "body_hash", "root_id", "last_turn", "spent_turns", "spent_tokens", "group_size", "annotated"}
)
"""Columns of a head that the list has not."""

NOBODY = "nobody"
"""No session has this id."""

BAD_CONDITIONS: Sequence[Mapping[str, Any]] = (
    {"min_reward": math.nan},
    {"max_reward": math.inf},
    {"metadata": ["=value"]},
    {"metadata": ["key"]},
)
"""What no list of sessions can be asked for."""


async def judge(world: World, seed: int, processes: Sequence[Process]) -> None:
    """Never ends where one is not answered."""
    logs = _logs(world)
    for process in processes:
        for session_id, log in logs.items():
            # An erasure that was cut short has taken texts out of the log, and tells nobody before its end.
            if log is None or not any(lacks_text(recorded.event) for recorded in log.events):
                await _knows(world, process, session_id, None if log is None else log.session)
    rng = random.Random(f"asked {seed}")
    if processes and rng.random() < ASKED:
        process = rng.choice(processes)
        there = {session_id: log for session_id, log in logs.items() if log is not None}
        await _lists(world, process, there)
        await _lists_groups(world, process, there)
        for session_id, log in there.items():
            lines = await asked(world, process, lambda: _lines(process, session_id))  # noqa: B023
            events = [(recorded.seq, name_of(recorded.event)) for recorded in log.events]
            same = lines == events or not _is_still(world, session_id, log.session.version)
            world.must(same, f"{process.name} gives other events of {session_id} than there are")
        for bad in BAD_CONDITIONS:
            world.must(_is_refused(bad), f"a list may be asked for with {bad}")
        erase = process.service.erasure.erase
        for work in (lambda: _lines(process, NOBODY), lambda: _refused(process, NOBODY), lambda: erase(NOBODY)):
            world.must(await asked(world, process, work) is None, f"{process.name} knows a session that is not there")


def _logs(world: World) -> dict[str, FoldedLog | None]:
    ids = world.store.read(lambda connection: repair.session_ids(connection, TABLES, "", ALL))
    return {one: _log(world, one) for one in ids}


def _log(world: World, session_id: str) -> FoldedLog | None:
    return world.store.read(lambda connection: repair.read_log(CoreReads(connection), session_id))


def _is_still(world: World, session_id: str, version: int) -> bool:
    """Has nothing been written to it since? A process may have closed it meanwhile, because it was idle."""
    now = _log(world, session_id)
    return now is not None and now.session.version == version


async def groups_listed(world: World, process: Process) -> None:
    """Groups are what the logs of their sessions say. Never ends where the process does not answer."""
    await _lists_groups(world, process, {one: log for one, log in _logs(world).items() if log is not None})


async def _knows(world: World, process: Process, session_id: str, session: Session | None) -> None:
    """What it has cached goes on with what the others have written."""
    if process.service.cache.known(session_id) is None:
        return
    entry = await asked(world, process, lambda: process.service.cache.current(session_id))
    if entry is None or session is None:
        world.must(entry is None and session is None, f"{process.name} knows {session_id}, or the log does")
        return
    same = encode_session(entry.session) == encode_session(session)
    if not same and not _is_still(world, session_id, session.version):
        return
    world.must(same, f"{process.name} knows another {session_id} than the log")
    keyed = {turn.retry_key: turn.number for turn in session.turns if turn.retry_key is not None}
    world.must(entry.keyed == keyed, f"{process.name} knows other keys of {session_id} than the log")


async def _lists(world: World, process: Process, logs: Mapping[str, FoldedLog]) -> None:
    """Nobody has a turn in flight any more."""
    listed = process.service.session_list
    page = await asked(world, process, lambda: listed.page(SessionQuery(), None, ALL))
    rows: dict[str, Mapping[str, Any]] = {row["session_id"]: row for row in page["sessions"]} if page else {}
    world.must(rows.keys() == logs.keys(), f"{process.name} lists {sorted(rows)} of {sorted(logs)}")
    for session_id, row in rows.items():
        log = logs[session_id]
        said = {**repair.head_row(log), "running_since": None, "tags": list(log.session.tags)}
        said["failed"] = log.session.failed
        other = [name for name, value in said.items() if name not in UNLISTED and row.get(name, "") != value]
        same = not other or not _is_still(world, session_id, log.session.version)
        world.must(same, f"{process.name} lists {session_id} with another {other} than the log says")


async def _lists_groups(world: World, process: Process, logs: Mapping[str, FoldedLog]) -> None:
    made: Groups = process.service.features["groups"]
    page = await asked(world, process, lambda: made.listed.page(Selection(), None, ALL))
    assert page is not None
    query = select(groups.c.run, groups.c.group_id).where(groups.c.acked_at.is_not(None))
    acknowledged = {GroupKey(*row) for row in world.store.read(lambda connection: connection.execute(query).all())}
    for group in page["groups"]:
        group_id = GroupKey(group["run"], group["group_id"])
        is_told = group["state"] == "acknowledged"
        world.must(is_told == (group_id in acknowledged), f"{process.name} says that {group_id} is {group['state']}")
        members = [
            config
            for config, log in ((log.session.config, log) for log in logs.values())
            if (config.of_run, config.group_id) == group_id and log.root_id is None and log.session.status != "undone"
        ]
        attempts = {config.attempt for config in members if config.attempt is not None}
        first, size = int(0 not in attempts), max((config.group_size or 0 for config in members), default=0)
        end = max(*attempts, first + size) if attempts else 0
        missing = [one for one in range(first, end) if one not in attempts]
        same = group["missing_attempts"] == missing
        world.must(same, f"{process.name} says that {group_id} lacks {group['missing_attempts']}, not {missing}")


def _is_refused(conditions: Mapping[str, Any]) -> bool:
    try:
        SessionQuery(**conditions)
    except ValidationError:
        return True
    return False


async def _lines(process: Process, session_id: str) -> list[tuple[int, str]]:
    service = process.service
    lines = await event_log.event_lines(service.database, service.followers, session_id, 0, False)
    found = [msgspec.json.decode(line) async for piece in lines for line in piece.splitlines()]
    return [(line["seq"], line["type"]) for line in found]


async def _refused(process: Process, session_id: str) -> object:
    return await event_log.refused_reply(process.service.database, session_id, 1)


async def asked(world: World, process: Process, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
    """What a process answers, in the end; None where it does not know the session."""
    while True:
        try:
            return await process.call(work, lambda _: None)
        except SessionNotFound:
            return None
        except (AppError, Disconnected) as error:
            world.note(f"{process.name} is asked again: {type(error).__name__} {error}")
            await asyncio.sleep(AGAIN_S)
