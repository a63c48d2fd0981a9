"""Names of sessions that come again: a client finishes one, and the name's next request begins another.

The first generation of a name has the name as its id; a later one has an id like any other. At most one generation is
open, and it is the newest: one is begun only once the one before it is finished, and the store has one of each number.
"""

from __future__ import annotations

import contextlib
from functools import partial

import msgspec

from app.domain.session import Session
from app.errors import SessionClosed, SessionExists, SessionNotFound, SessionUnreadable
from app.sessions.cache import SessionCache
from app.sessions.lifecycle import NewSession, Sessions, made_session_id
from app.store.sessions import Generation, generations

REMEMBERED = 1 << 16
"""Names whose newest generation a process remembers: about 10 MB."""


class Names:
    """What clients call sessions. Whatever looks a name up asks here, so that names can be told apart by more."""

    def __init__(self, cache: SessionCache, sessions: Sessions) -> None:
        self._cache = cache
        self._sessions = sessions
        self.later: dict[str, str] = {}
        """The newest generation of each name, as far as this process knows, unless it is the first. A turn there finds
        out if it has been finished since."""

    async def newest(self, name: str) -> str:
        """The id of the newest generation of a name; an id that is no name's is its own. Raises StoreUnavailable."""
        session_id = self.later.get(name, name)
        known = self._cache.known(session_id)
        if known is not None and known.name is None:
            return session_id
        try:
            live = await self._cache.current(session_id)
        except SessionUnreadable:
            live = None  # What does not read it, such as its erasure, has to be led to it.
        if live is not None and not live.session.frees_name:
            return session_id
        newest = _newest(await self._generations(name))
        if newest is not None:
            session_id = newest.session_id
        self._remember(name, session_id)
        return session_id

    async def require(self, name: str, generation: int) -> str:
        """The id of one generation of a name. Raises SessionNotFound, StoreUnavailable."""
        found = (one.session_id for one in await self._generations(name) if one.number == generation)
        session_id = next(found, name if generation == 1 else None)
        if session_id is None:
            raise SessionNotFound(f"session {name} has no generation {generation}")
        return session_id

    async def finish(self, name: str) -> Session | None:
        """Close the newest generation of a name; the name's next request begins the next one. Returns what it was
        before, or None if nothing has this name. A session that no client has named is closed for good.

        Raises SessionUnreadable, Restored, StoreUnavailable, StoreFull.
        """
        live = await self._cache.current(await self.newest(name))
        if live is None:
            return None
        session = live.session
        if session.status == "open":
            with contextlib.suppress(SessionClosed):  # by another request at the same moment
                await self._sessions.close(session.session_id, "deleted" if session.name is None else "finished")
        return session

    async def begin(self, new: NewSession) -> str:
        """Begin the next generation of `new.name`, whose newest one was finished; the id of what is then the newest.

        If another request has begun it meanwhile, it must be alike. Raises as `Sessions.create`.
        """
        assert new.name is not None
        every = await self._generations(new.name)
        newest = _newest(every)
        if newest is not None and await self._frees_name(newest):
            at = {"session_id": made_session_id(), "generation": every[0].number + 1}
        elif newest is not None:
            at = {"session_id": newest.session_id, "generation": newest.number}
        else:
            at = {}
        await self._sessions.create(msgspec.structs.replace(new, **at))
        return await self.newest(new.name)

    async def begin_if_finished(self, new: NewSession) -> str:
        """As `begin`; one that another request has begun serves whatever it is like."""
        assert new.name is not None
        try:
            return await self.begin(new)
        except SessionExists:
            return await self.newest(new.name)

    async def _generations(self, name: str) -> list[Generation]:
        database = self._cache.database
        return await database.read(partial(generations, points=database.points, name=name))

    async def _frees_name(self, generation: Generation) -> bool:
        if generation.frees_name is not None:
            return generation.frees_name
        live = await self._cache.current(generation.session_id)
        return live is not None and live.session.has_next

    def _remember(self, name: str, session_id: str) -> None:
        self.later.pop(name, None)
        if session_id == name:
            return
        self.later[name] = session_id
        if len(self.later) > REMEMBERED:
            del self.later[next(iter(self.later))]


def _newest(every: list[Generation]) -> Generation | None:
    """The open one, which a restore may have opened again behind others; else the highest that is not undone."""
    is_open = (one for one in every if one.status == "open")
    is_there = (one for one in every if one.status != "undone")
    return next(is_open, None) or next(is_there, None) or next(iter(every), None)
