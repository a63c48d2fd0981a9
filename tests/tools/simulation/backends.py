"""The real PostgreSQL below a simulation: its sessions, driven one statement at a time.

A statement is sent, and nothing else happens until it is answered or waits for a lock, as in PostgreSQL's own
isolationtester. So the order in which statements reach the server is the schedule's. A real event loop runs inside the
simulated one meanwhile, whose time stands still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import asyncpg
import uvloop

T = TypeVar("T")

Work = Callable[[Any], Coroutine[Any, Any, Any]]
"""A request, made on asyncpg's connection."""

LOOK_S = 0.004
"""After which real time a statement that has no answer is looked at: it computes, or it waits for a lock."""

_WAITS = "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted)"

SESSION = {
    # `clock_timestamp` is the simulation's; see `postgres_store`.
    "search_path": "simulated, public, pg_catalog",
    # Whoever closes the circle is the one that finds it, at once.
    "deadlock_timeout": "1ms",
    "jit": "off",
    # As `app.store.postgres.BEGIN` has it for writes.
    "enable_seqscan": "off",
    "plan_cache_mode": "force_generic_plan",
}


class Backend:
    """One session at the server, used by one simulated connection after the other. `answer` is None while idle."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.pid: int = raw.get_server_pid()
        self.answer: asyncio.Task[Any] | None = None
        self.prepared: dict[str, Any] = {}
        self.codecs: set[str] = set()

    @property
    def is_in_transaction(self) -> bool:
        return bool(self.raw.is_in_transaction())


class Backends:
    """All sessions of a simulation. `looker` is another one, which looks at them."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._loop = uvloop.new_event_loop()
        self._spare: list[Backend] = []
        self.looker = self.new()

    def close(self) -> None:
        for backend in (*self._spare, self.looker):
            backend.raw.terminate()
        self.run(asyncio.sleep(0))
        self._loop.close()

    def run(self, work: Awaitable[T]) -> T:
        """Inside whatever loop runs here."""
        outer = asyncio.events._get_running_loop()
        asyncio.events._set_running_loop(None)
        try:
            return self._loop.run_until_complete(work)
        finally:
            asyncio.events._set_running_loop(outer)

    def _run_for(self, answer: asyncio.Task[Any], seconds: float) -> None:
        """Until it is done, or for so long. As `run` of `asyncio.wait`, at half the cost."""
        over = self._loop.create_future()

        def end(*_: object) -> None:
            if not over.done():
                over.set_result(None)

        late = self._loop.call_later(seconds, end)
        answer.add_done_callback(end)
        self.run(over)
        answer.remove_done_callback(end)
        late.cancel()

    def new(self) -> Backend:
        return Backend(self.run(asyncpg.connect(self._dsn, server_settings=SESSION)))

    def take(self) -> Backend:
        """An idle one."""
        return self._spare.pop() if self._spare else self.new()

    def send(self, backend: Backend, work: Work) -> bool:
        """Is the statement answered? If not, it waits for a lock."""
        backend.answer = self._loop.create_task(work(backend.raw))
        return self._is_answered(backend)

    def look_again(self, backend: Backend) -> bool:
        """Is it answered now that another transaction has ended?"""
        return not self._waits(backend) and self._is_answered(backend)

    def _is_answered(self, backend: Backend) -> bool:
        assert backend.answer is not None
        while True:
            self._run_for(backend.answer, LOOK_S)
            if backend.answer.done():
                return True
            if self._waits(backend) and not backend.answer.done():
                return False

    def _waits(self, backend: Backend) -> bool:
        return bool(self.run(self.looker.raw.fetchval(_WAITS, backend.pid)))

    def cancel(self, backend: Backend) -> None:
        """The statement that waits fails."""
        assert backend.answer is not None
        answer, backend.answer = backend.answer, None
        self.run(self.looker.raw.execute(f"SELECT pg_cancel_backend({backend.pid})"))
        self.run(asyncio.wait({answer}))
        answer.exception()

    def end(self, backend: Backend) -> None:
        """Whatever it does is rolled back; afterwards it is idle."""
        if backend.answer is not None:
            self.cancel(backend)
        if backend.is_in_transaction:
            self.run(backend.raw.execute("ROLLBACK"))

    def give_back(self, backend: Backend) -> None:
        """Its connection has ended."""
        self.end(backend)
        self._spare.append(backend)
