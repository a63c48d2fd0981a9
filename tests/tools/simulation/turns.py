"""Judges every turn that a schedule has committed, by what was asked and what the engines sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import cast

from app.composition import store_points
from app.domain.events import SessionRestored, TurnOpened
from app.domain.session import rid_of
from app.export.rows import known
from app.store import pins, repair
from app.store.content import fetch_objects, read_content, read_sessions
from app.store.database import Database
from app.store.feed import END
from app.store.sessions import decode_events
from ops.verify import TABLES
from tests.tools.simulation import trees, windows
from tests.tools.simulation.spelling import Asked
from tests.tools.simulation.store import ReadDatabase
from tests.tools.simulation.told import Claimed, Story, Unexplained
from tests.tools.simulation.world import World


async def judge(world: World) -> None:
    """Everything that is wrong becomes a problem of the history. Of the sessions that clients created: a fork's turns
    were asked for elsewhere, and those of streaming engines are judged by `staged`."""
    if world.settings.upstream_dialect == "vllm":
        return
    asked = {
        (rid_of(one.turn.session_id, claim.seq, cast(TurnOpened, claim.event).incarnation), claim.at): one
        for one in world.spelling.asked
        if (claim := one.turn.claim) is not None
    }
    for session_id in world.store.read(lambda connection: repair.session_ids(connection, TABLES, "", 1000)):
        if session_id not in world.history.sessions:
            continue
        async for problem in _problems(world, session_id, asked):
            world.history.problem(f"{session_id}: {problem}")


async def _problems(world: World, session_id: str, asked: Mapping[Claimed, Asked]) -> AsyncIterator[str]:
    database = cast(Database, ReadDatabase(world.store))
    logs = world.store.read(lambda c: read_sessions(c, [session_id], END))
    stored = logs.get(session_id)
    if stored is None or stored.status == "erased":
        return
    world.store.read(lambda c: read_content(c, logs, {session_id: None}, replay=True))
    await fetch_objects(database, [stored])
    found, log = known(stored), decode_events(stored.events)
    try:
        matcher = found.session.config.matcher
        story = Story(stored, found.session, log, matcher, asked, world.engines.generated)
    except Unexplained as error:
        yield str(error)
        return
    for problem in trees.problems(story, stored, found):
        yield problem
    for problem in windows.rows(story, stored):
        yield problem
    for problem in await windows.tombstones(story, database):
        yield problem
    # A checkpoint keeps what could be read when it was made, and a restore brings back what had left a window.
    is_pinned = world.store.read(lambda connection: pins.read_pinned_upto(connection, store_points(), session_id))
    if not is_pinned and not any(isinstance(recorded.event, SessionRestored) for recorded in log):
        for problem in windows.windows(story, log, world.settings.max_replay_bytes):
            yield problem
