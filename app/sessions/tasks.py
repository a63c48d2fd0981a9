"""What sessions are about: the beginning of their first turn's request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from app.store.content import first_exchanges
from app.store.damage import of_readable
from app.store.database import Database
from turnlog.actions import task_text
from workers import codec
from workers.codec import CorruptContent

SESSIONS_PER_READ = 10
"""Sessions whose content is in memory at once; a message may have megabytes."""


async def tasks_of(database: Database, session_ids: Sequence[str]) -> dict[str, str]:
    """The tasks by session, but for sessions without a turn or readable content. Raises StoreUnavailable."""
    tasks: dict[str, str] = {}
    for at in range(0, len(session_ids), SESSIONS_PER_READ):
        part = session_ids[at : at + SESSIONS_PER_READ]
        stored = await database.read(lambda connection: of_readable(connection, part, first_exchanges))  # noqa: B023
        tasks |= await asyncio.to_thread(_tasks, stored)
    return tasks


def _tasks(stored: Mapping[str, bytes | None]) -> dict[str, str]:
    tasks = {}
    for session_id, exchange in stored.items():
        try:
            messages = codec.unpack_messages(exchange).messages
            tasks[session_id] = task_text([msgspec.json.decode(raw) for raw in messages])
        except (CorruptContent, msgspec.MsgspecError):
            continue
    return {session_id: task for session_id, task in tasks.items() if task}
