"""Brings archived sessions back into the database, where they can be changed."""

from __future__ import annotations

import logging
from functools import partial
from typing import TypeVar

import msgspec

from app.crash_points import reach
from app.errors import PayloadsUnavailable, SessionNotFound
from app.store import reads
from app.store.archives.format import Place
from app.store.archives.places import archived
from app.store.archives.rows import BringBack
from app.store.log import ARCHIVED, Operation, Refused
from app.store.ports import Database, Writer
from workers.codec import CorruptContent

log = logging.getLogger("turnlog.archives")

T = TypeVar("T")


class ArchiveCounters(msgspec.Struct):
    """Sessions that this process has moved into archives and out of them."""

    archived: int = 0
    brought_back: int = 0


class Archives:
    """The archived sessions of the store. Without object storage there are none."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self.counters = ArchiveCounters()
        self._database = database
        self._writer = writer

    async def submit(self, operation: Operation[T]) -> T:
        """Submit an operation on a session that may be archived: it is then brought back first.

        Raises PayloadsUnavailable, SessionUnreadable, StoreUnavailable, StoreFull.
        """
        while True:
            outcome = await self._writer.submit(operation)
            if not (isinstance(outcome, Refused) and outcome.status == ARCHIVED):
                return outcome
            await self.bring_back(operation.session_id)

    async def bring_back(self, session_id: str) -> bool:
        """Write an archived session's rows into the database; False if it is there already.

        Raises SessionNotFound, PayloadsUnavailable, SessionUnreadable, StoreUnavailable, StoreFull.
        """
        missed: Place | None = None
        while True:
            found = await self._database.read(partial(archived, session_id=session_id))
            if found is None:
                head = await self._database.read(lambda connection: reads.head(connection, session_id))
                if head is None:
                    raise SessionNotFound(f"session {session_id} does not exist")
                return False
            if await self._bring_back(session_id, found.place, is_last_try=found.place == missed):
                return True
            missed = found.place

    async def _bring_back(self, session_id: str, place: Place, *, is_last_try: bool) -> bool:
        """False: the session is not there any more."""
        from app.store.archives.reader import read_group

        bucket = self._database.bucket
        if bucket is None:
            raise PayloadsUnavailable(f"session {session_id} is archived in object storage: set TURNLOG_PAYLOADS")
        try:
            session = (await read_group(bucket, place)).get(session_id)
            if session is None:
                raise CorruptContent(f"the archive {place.archive} does not have it")
        except CorruptContent as error:
            if is_last_try:
                raise self._database.unreadable.error(session_id, error) from error
            return False
        reach("before_bring_back")
        if not await self._writer.submit(BringBack(session_id, place, session)):
            return False
        self.counters.brought_back += 1
        log.info("session %s was brought back from archive %s", session_id, place.archive)
        return True
