"""Names of sessions that come again: a client finishes one, and the name's next request begins another.

A name is a run's. Its first generation has the id that follows from both (`first_id`), or the name as its id where
`POST /sessions` gave it that; a later one has an id like any other. At most one generation is open, and it is the
newest: one is begun only once the one before it is finished, and the store has one of each number.
"""

from __future__ import annotations

import contextlib
from functools import partial

import msgspec

from app.domain.events import DEFAULT_RUN
from app.domain.names import first_id
from app.domain.session import Session
from app.errors import RunMismatch, SessionClosed, SessionExists, SessionNotFound, SessionUnreadable
from app.sessions.cache import CacheEntry, SessionCache
from app.sessions.lifecycle import NewSession, Sessions, made_session_id
from app.store.sessions import Generation, generations

REMEMBERED = 1 << 16
"""Names whose newest generation a process remembers: about 10 MB."""


class Names:
    """What clients call sessions.

    `run` is the run that the request names, None where it names none: what it calls a session is then a name of the
    default run, or any session's id. With `run` all of these raise RunMismatch for an id of another run's session.
    """

    def __init__(self, cache: SessionCache, sessions: Sessions) -> None:
        self._cache = cache
        self._sessions = sessions
        self._later: dict[tuple[str, str], str] = {}
        """The newest generation of each run's names, as far as this process knows, unless it has the first one's id.
        A turn there finds out if it has been finished since."""

    def known(self, run: str | None, name: str) -> str:
        """The id of the newest generation that this process knows of, else that of the first."""
        named = run or DEFAULT_RUN
        return self._later.get((named, name)) or first_id(named, name)

    async def at(self, run: str | None, name: str) -> str:
        """As `known`; a name of a run is looked up where this process has no session of it in memory.

        Raises SessionUnreadable, StoreUnavailable.
        """
        session_id = self.known(run, name)
        if run is not None:
            if await self._cache.get(session_id) is None:
                return await self.newest(run, name)
            await self.require_run(session_id, run)
        return session_id

    async def newest(self, run: str | None, name: str) -> str:
        """The id of the newest generation of a name; an id that is no name's is its own. Raises StoreUnavailable."""
        session_id = self.known(run, name)
        known = self._cache.known(session_id)
        if known is None or known.name is not None:
            live = await self._current(session_id)
            if live is None or live.session.frees_name:
                newest = _newest(await self._generations(_owner(run, name, live), name))
                if newest is not None:
                    session_id = newest.session_id
                elif live is None and await self._is_id(name):
                    session_id = name
                self._remember(run or DEFAULT_RUN, name, session_id)
        if run is not None:
            await self.require_run(session_id, run)
        return session_id

    async def of_path(self, run: str | None, name: str) -> str:
        """As `newest`, of a path: the id of another run's session is one there, even if its client chose it."""
        session_id = await self.newest(run, name)
        if run is not None and await self._sessions.config_of(session_id) is None:
            await self.require_run(name, run)
        return session_id

    async def require(self, run: str | None, name: str, generation: int) -> str:
        """The id of one generation of a name. Raises SessionNotFound, StoreUnavailable."""
        first = first_id(run or DEFAULT_RUN, name)
        owner = _owner(run, name, await self._current(first))
        found = (one.session_id for one in await self._generations(owner, name) if one.number == generation)
        session_id = next(found, first if generation == 1 else None)
        if session_id is None:
            raise SessionNotFound(f"session {name} has no generation {generation}")
        if run is not None:
            await self.require_run(session_id, run)
        return session_id

    async def require_run(self, session_id: str, run: str) -> None:
        """Raises RunMismatch if the session is another run's, SessionUnreadable, StoreUnavailable."""
        config = await self._sessions.config_of(session_id)
        if config is not None and config.of_run != run:
            raise RunMismatch(f"session {session_id} belongs to run {config.of_run}, not to {run}")

    async def finish(self, run: str | None, name: str) -> Session | None:
        """Close the newest generation of a name; the name's next request begins the next one. Returns what it was
        before, or None if nothing has this name. A session that no client has named is closed for good.

        Raises RunMismatch as `require_named_run`, SessionUnreadable, Restored, StoreUnavailable, StoreFull.
        """
        live = await self._cache.current(await self.newest(run, name))
        if live is None:
            return None
        session = live.session
        require_named_run(session, run, name)
        if session.status == "open":
            with contextlib.suppress(SessionClosed):  # by another request at the same moment
                await self._sessions.close(session.session_id, "deleted" if session.name is None else "finished")
        return session

    async def begin(self, new: NewSession) -> str:
        """Begin the next generation of `new.name`, whose newest one was finished; the id of what is then the newest.

        If another request has begun it meanwhile, it must be alike. Raises as `Sessions.create`.
        """
        assert new.name is not None
        run = await self._run_of(new)
        every = await self._generations(run, new.name)
        newest = _newest(every)
        if newest is not None and await self._frees_name(newest):
            at = {"session_id": made_session_id(), "generation": every[0].number + 1}
        elif newest is not None:
            at = {"session_id": newest.session_id, "generation": newest.number}
        else:
            at = {}
        await self._sessions.create(msgspec.structs.replace(new, **at))
        return await self.newest(run, new.name)

    async def begin_if_finished(self, new: NewSession) -> str:
        """As `begin`; one that another request has begun serves whatever it is like."""
        assert new.name is not None
        try:
            return await self.begin(new)
        except SessionExists:
            return await self.newest(await self._run_of(new), new.name)

    async def _run_of(self, new: NewSession) -> str:
        """The run in which the session is created."""
        parent = new.config.parent
        above = None if new.config.run is not None or parent is None else await self._sessions.config_of(parent)
        return new.config.of_run if above is None else above.of_run

    async def _generations(self, run: str, name: str) -> list[Generation]:
        database = self._cache.database
        return await database.read(partial(generations, points=database.points, run=run, name=name))

    async def _current(self, session_id: str) -> CacheEntry | None:
        """None also for one that cannot be read: what does not read it, such as its erasure, has to be led to it."""
        try:
            return await self._cache.current(session_id)
        except SessionUnreadable:
            return None

    async def _is_id(self, text: str) -> bool:
        """Is this the id of a session, and no name that a client has given it?"""
        live = await self._current(text)
        return live is not None and live.session.name != text

    async def _frees_name(self, generation: Generation) -> bool:
        if generation.frees_name is not None:
            return generation.frees_name
        live = await self._cache.current(generation.session_id)
        return live is not None and live.session.has_next

    def _remember(self, run: str, name: str, session_id: str) -> None:
        self._later.pop((run, name), None)
        if session_id == first_id(run, name):
            return
        self._later[run, name] = session_id
        if len(self._later) > REMEMBERED:
            del self._later[next(iter(self._later))]


def require_named_run(session: Session, run: str | None, name: str) -> None:
    """Raises RunMismatch where no run was asked for and a client gave the session this name in another run than the
    default one: who says the name alone may mean another session. An id that no client chose leads to its session."""
    owner = session.config.of_run
    if run is None and session.name == name and owner != DEFAULT_RUN:
        raise RunMismatch(f"session {session.session_id} belongs to run {owner}; send x-turnlog-run: {owner}")


def _owner(run: str | None, name: str, named: CacheEntry | None) -> str:
    """The run that the name is of. Where none is asked for, an id that `POST /sessions` gave is a name of its session's
    run; `named` is the session with this id."""
    if run is None and named is not None and named.session.name == name:
        return named.session.config.of_run
    return run or DEFAULT_RUN


def _newest(every: list[Generation]) -> Generation | None:
    """The open one, which a restore may have opened again behind others; else the highest that is not undone."""
    is_open = (one for one in every if one.status == "open")
    is_there = (one for one in every if one.status != "undone")
    return next(is_open, None) or next(is_there, None) or next(iter(every), None)
