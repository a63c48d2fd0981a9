"""What must hold of every process once nothing fails: what it knows of a session is what the log says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from app.domain.session import Session, encode_session, fold
from app.errors import AppError
from app.sessions.cache import CacheEntry
from app.store import projections as heads
from app.store import reads
from ops.verify import TABLES
from tests.tools.simulation.process import Disconnected, Process
from tests.tools.simulation.world import World

AGAIN_S = 0.5


async def judge(world: World, processes: Sequence[Process]) -> None:
    """What a process has cached goes on with what the others have written. Never ends where one is not answered."""
    for session_id in world.store.read(lambda connection: heads.session_ids(connection, TABLES, "", 1000)):
        for process in processes:
            known = process.service.cache.known(session_id)
            if known is None:
                continue
            entry = await _asked(world, process, session_id)
            session = world.store.read(lambda c: fold(session_id, reads.load_events(c, session_id)))  # noqa: B023
            here = None if entry is None else entry.session
            world.must(_bytes(here) == _bytes(session), f"{process.name} knows another {session_id} than the log")
            if entry is not None and session is not None:
                keyed = {turn.retry_key: turn.number for turn in session.turns if turn.retry_key is not None}
                world.must(entry.keyed == keyed, f"{process.name} knows other keys of {session_id} than the log")


async def _asked(world: World, process: Process, session_id: str) -> CacheEntry | None:
    while True:
        try:
            return await process.call(lambda: process.service.cache.current(session_id), lambda _: None)
        except (AppError, Disconnected) as error:
            world.note(f"{session_id} at {process.name}: {type(error).__name__} {error}")
            await asyncio.sleep(AGAIN_S)


def _bytes(session: Session | None) -> bytes:
    return b"" if session is None else encode_session(session)
