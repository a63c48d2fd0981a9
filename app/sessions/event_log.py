"""A session's log for clients: its events, optionally followed live, and its refused replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec

from app.domain.events import Recorded, SessionErased, UnknownEvent
from app.errors import NotFound, SessionNotFound, SessionUnreadable
from app.sessions.followers import Followers, wait_for_change
from app.sessions.inspection import event_fields
from app.store import heads_view, reads
from app.store.ports import Database
from workers import codec
from workers.codec import CorruptContent

PAGE = 500
"""Events read in one query."""


async def event_lines(
    database: Database, followers: Followers, session_id: str, after: int, follow: bool
) -> AsyncIterator[bytes]:
    """The events after seq `after` as NDJSON. Raises SessionNotFound before the first line."""
    if await database.read(lambda connection: heads_view.head(connection, session_id), session_id=session_id) is None:
        raise SessionNotFound.of(session_id)
    return _event_lines(database, followers, session_id, after, follow)


async def _event_lines(
    database: Database, followers: Followers, session_id: str, after: int, follow: bool
) -> AsyncIterator[bytes]:
    with followers.follow(session_id) as changed:
        while True:
            changed.clear()
            page = await _page(database, session_id, after)
            if page:
                after = page[-1].seq
                yield await asyncio.to_thread(_ndjson, page)
            if len(page) == PAGE:
                continue
            if not follow or followers.stopping or (page and isinstance(page[-1].event, SessionErased)):
                return
            await wait_for_change(changed)


async def _page(database: Database, session_id: str, after: int) -> list[Recorded]:
    try:
        return await database.read(
            lambda connection: reads.load_events(connection, session_id, after=after, limit=PAGE),
            session_id=session_id,
        )
    except UnknownEvent as error:
        raise SessionUnreadable(f"session {session_id}: {error}") from error


def _ndjson(page: Sequence[Recorded]) -> bytes:
    return b"".join(msgspec.json.encode(event_fields(recorded)) + b"\n" for recorded in page)


async def refused_reply(database: Database, session_id: str, fence: int) -> tuple[int, bytes]:
    """The size of a refused reply and the part of it that was kept. Raises SessionNotFound, NotFound,
    SessionUnreadable."""
    head, found = await database.read(
        lambda c: (heads_view.head(c, session_id), reads.refused_reply(c, session_id, fence)), session_id=session_id
    )
    if head is None:
        raise SessionNotFound.of(session_id)
    if found is None:
        raise NotFound(f"no refused reply of session {session_id} with fence {fence} is kept")
    try:
        return found[0], codec.decompress(found[1])
    except CorruptContent as error:
        raise SessionUnreadable(f"session {session_id}: {error}") from error
