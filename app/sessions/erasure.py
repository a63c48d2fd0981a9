"""Erases sessions, and frees the replay payloads of closed ones: what is deleted, in which steps.

Each step is a transaction of its own, because SQLite overwrites what it frees. The event that says what is gone comes
before the bytes go, and the session is erased last, so that whoever tries again after a crash finds what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from app.crash_points import reach
from app.domain import retention
from app.domain.events import UnknownEvent
from app.errors import SessionNotFound, SessionUnreadable
from app.sessions.cache import SessionCache
from app.sessions.event_log import Followers
from app.sessions.lifecycle import Clock, Sessions
from app.store.log import Appended, Refused
from app.store.log_sessions import Erase, EraseTexts, FreeChunks, FreeReplay, Rewritten, text_rows, without_text
from app.store.ports import Database, Writer, of_session
from app.store.sessions import fold_rows, last_tombstone, session_rows
from app.store.statements import ENDED

log = logging.getLogger("turnlog.sessions")

FREED_AT_ONCE = 4
"""Chunks, of at most 1 MiB each, that one transaction overwrites."""

TEXTS_AT_ONCE = 16
"""Events, of at most about 64 KiB each, that one transaction rewrites."""


class Erasure:
    """`sessions` closes what is erased."""

    def __init__(
        self,
        *,
        database: Database,
        writer: Writer,
        cache: SessionCache,
        followers: Followers,
        clock: Clock,
        sessions: Sessions,
    ) -> None:
        self._database = database
        self._writer = writer
        self._cache = cache
        self._followers = followers
        self._clock = clock
        self._sessions = sessions
        self.elsewhere: list[Callable[[str], Awaitable[bool | None]]] = []
        """Erase a session where a feature has it, and a root's rollout. None: it is not there; False: that goes on."""
        self.roots_elsewhere: list[Callable[[str], Awaitable[Sequence[str]]]] = []
        """The roots of a run's rollouts that a feature has, and that are not in the database."""
        self.forget: list[Callable[[str], Awaitable[None]]] = []
        """What features do with a session that has been erased, before that is answered."""
        self.finishing: list[Callable[[str], Awaitable[bool]]] = []
        """Asked last: is what features have of the session's rollout gone? They hurry."""

    async def erase(self, session_id: str) -> bool:
        """Close the session if needed, delete its content and, for a root, that of its whole rollout; then empty the
        log files. Returns whether all of it is gone: objects are deleted, and archives written again, afterwards.

        Idempotent. The root is erased last, so a retry after a crash finds what is left. Raises SessionNotFound.
        """
        return await self.erase_all([session_id])

    async def erase_all(self, session_ids: Sequence[str]) -> bool:
        """As `erase`, one after another; the log files are emptied once."""
        left = [await self._erase(session_id) for session_id in session_ids]
        await self._database.empty_log_file()
        gone = [await ask(session_id) for session_id in session_ids for ask in self.finishing]
        return all(left) and all(gone)

    async def _erase(self, session_id: str) -> bool:
        """False: that goes on where a feature has it."""
        # Before, so that nothing comes back from there meanwhile; and after, for what has just left.
        before = [await ask(session_id) for ask in self.elsewhere]
        try:
            while True:
                await self._sessions.close_if_open(session_id)
                is_erased = await self._erase_members(session_id)
                if await self.drop_content(session_id) and is_erased:
                    break
                log.info(
                    "erasing session %s again: a restore has opened it, or another session of its rollout", session_id
                )
        except SessionNotFound:
            if all(answer is None for answer in before):
                raise
            await self._erase_members(session_id)  # those that did not leave with the root
        return False not in [await ask(session_id) for ask in self.elsewhere]

    async def _erase_members(self, session_id: str) -> bool:
        """False if a restore of a checkpoint has opened one of them again meanwhile."""
        is_erased = True
        # The erased too: where an earlier request ended in between, features have not forgotten them.
        async for members in self._sessions.members(session_id, *ENDED, "erased"):
            for member in members:
                is_erased &= await self.drop_content(member)
        return is_erased

    async def free_replay(self, session_id: str, *, unless_pinned: bool = False) -> None:
        """Tombstone a closed session's replay payloads and free their bytes and its refused replies, in steps.

        `unless_pinned`: not if a checkpoint has it.
        """
        snapshot, rows = await of_session(self._database, session_id, session_rows)
        try:
            session = await asyncio.to_thread(fold_rows, session_id, snapshot, rows)
        except UnknownEvent as error:
            self._database.unreadable.warn(session_id, error)
            return
        event = None if session is None else await asyncio.to_thread(retention.tombstone_all, session)
        if session is not None and event is not None:
            outcome = await self._sessions.apply(
                FreeReplay(session_id, session.version, self._clock(), event, unless_pinned)
            )
            if not (isinstance(outcome, Appended) and outcome.events):
                return
            reach("after_tombstones")
        by = await of_session(self._database, session_id, last_tombstone)
        more = True
        while more:
            more = await self._writer.submit(FreeChunks(session_id, by, FREED_AT_ONCE))
            reach("after_freed")
            await asyncio.sleep(0)

    async def drop_content(self, session_id: str, *, unless_pinned: bool = False) -> bool:
        """Erase a closed session; False if it is open. Its content is in the log files until those are emptied.

        `unless_pinned`: not if a checkpoint has it.
        Raises SessionUnreadable if the content is on a damaged page.
        """
        try:
            erased = await self._drop_content(session_id, unless_pinned)
        finally:
            self._cache.drop(session_id)  # It may be erased although the store did not say so.
        reach("after_erase")
        if isinstance(erased, Appended):
            self._followers.notify(session_id)
        if isinstance(erased, Appended) or erased == Refused("erased"):  # a retry, after a crash in between, too
            for forget in self.forget:
                await forget(session_id)
        return erased != Refused("open")

    async def _drop_content(self, session_id: str, unless_pinned: bool) -> Appended | Refused:
        with contextlib.suppress(SessionUnreadable):
            await self.free_replay(session_id, unless_pinned=unless_pinned)
        upto, in_head = await self._erase_texts(session_id, unless_pinned=unless_pinned)
        return await self._writer.submit(Erase(session_id, self._clock(), upto, in_head, unless_pinned))

    async def _erase_texts(self, session_id: str, *, unless_pinned: bool) -> tuple[int, list[Rewritten]]:
        """Remove a client's text from existing events, in steps; returns the last event examined, and what is left to
        be written together with the session's row."""
        after = 0
        in_head: list[Rewritten] = []
        while True:
            rows = await of_session(self._database, session_id, text_rows, after, TEXTS_AT_ONCE)
            if not rows:
                return after, in_head
            rewritten = await asyncio.to_thread(without_text, rows)
            in_head += [text for text in rewritten if text.is_in_head]
            rewritten = [text for text in rewritten if not text.is_in_head]
            if rewritten:
                freed = sum(len(row.data) for row in rows)
                await self._writer.submit(EraseTexts(session_id, rewritten, freed, unless_pinned))
                reach("after_components")
            after = rows[-1].seq
