"""Reads the images that stored messages refer to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from app.domain import images
from app.domain.session import Session
from app.errors import NotFound, SessionUnreadable
from app.store.content import load_blobs
from app.store.ports import Database, of_session


async def image(database: Database, session: Session, sha256: str) -> bytes:
    """An image's bytes. Raises NotFound for one that the session does not have, SessionUnreadable."""
    if sha256 not in session.images:
        raise NotFound(f"session {session.session_id} has no image {sha256}")
    return (await _load(database, session, {sha256}))[sha256]


async def put_back(database: Database, session: Session, messages: Sequence[bytes]) -> Sequence[bytes]:
    """Stored messages with their images inline, as base64. Raises SessionUnreadable."""
    wanted = images.hashes(messages)
    if not wanted:
        return messages
    data = await _load(database, session, wanted)
    return await asyncio.to_thread(lambda: [images.put_back(message, data) for message in messages])


async def _load(database: Database, session: Session, wanted: set[str]) -> dict[str, bytes]:
    session_id = session.session_id
    missing = wanted - session.images.keys()
    if missing:
        raise SessionUnreadable(f"session {session_id}: image {min(missing)} is not in its log")
    numbers = {sha256: session.images[sha256] for sha256 in wanted}
    blobs = await of_session(database, session_id, load_blobs, numbers.values())
    return {sha256: blobs[number] for sha256, number in numbers.items()}
