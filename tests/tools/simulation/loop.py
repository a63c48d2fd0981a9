"""An event loop whose time is made up and whose order follows from a seed.

Time stands still while anything can run and then jumps to the next timer, so an hour costs nothing. What is ready runs
in the order of a random choice among its owners: simulated processes, which can be frozen or killed between any two
steps. It has no thread and no socket: what would run on a thread runs here, a little later.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

THREAD_S = 0.002
"""About how long work on a thread takes."""

ROUNDS = 20
"""How often what is left at the end is cancelled: a `finally` may wait again."""


class Owner:
    """Whose work a callback is: a process, or the world around the processes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.frozen_until = 0.0
        self.ready: list[asyncio.Handle] = []

    def context(self) -> contextvars.Context:
        """A new context: what is started in it belongs to this owner, with all that comes of it."""
        context = contextvars.copy_context()
        context.run(_OWNER.set, self)
        return context


_OWNER: contextvars.ContextVar[Owner] = contextvars.ContextVar("owner")


class Stuck(Exception):
    """Something is still awaited, but nothing is left that could happen."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """`rng` decides the order. `shuffled`: an owner's own callbacks do not even keep the order that asyncio gives them.

    `on_fault` is told of exceptions that nobody awaits, and at the end of tasks that a mistake in the code has ended.
    """

    def __init__(self, rng: random.Random, on_fault: Callable[[str, BaseException | None], None]) -> None:
        super().__init__()
        self.world = Owner("world")
        self.shuffled = False
        self._rng = rng
        self._on_fault = on_fault
        self._owners = [self.world]
        self._killed: list[Owner] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle, Owner]] = []
        self._number = 0
        self._now = 0.0
        self._tasks: list[asyncio.Task[Any]] = []
        self.is_ending = False

    def add_owner(self, owner: Owner) -> None:
        self._owners.append(owner)

    def kill(self, owner: Owner) -> None:
        """None of its callbacks runs any more; they are kept for the end."""
        self._owners.remove(owner)
        self._killed.append(owner)

    def time(self) -> float:
        return self._now

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._owner(context).ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, handle, self._owner(context)))
        return handle

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        outcome: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if outcome.cancelled():
                return
            try:
                result = func(*args)
            except BaseException as error:  # noqa: BLE001 - handed over to whoever awaits it, as from a thread
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        self.call_later(self._rng.expovariate(1 / THREAD_S), run)
        return outcome

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        """Kept until the end: a task of a killed process that was forgotten would run its `finally` blocks."""
        task: asyncio.Task[T] = super().create_task(coro, name=name, context=context)
        self._tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_ending:
            self._on_fault(str(context.get("message")), context.get("exception"))

    def run_until_complete(self, future: Any) -> Any:
        """Raises Stuck where the result can never come."""
        context = self.world.context()
        task = self.create_task(future, context=context)
        asyncio.events._set_running_loop(self)
        try:
            while not task.done():
                self._step()
        finally:
            self._end()
            asyncio.events._set_running_loop(None)
        return task.result()

    def _owner(self, context: contextvars.Context | None) -> Owner:
        return _OWNER.get(self.world) if context is None else context.get(_OWNER, self.world)

    def _step(self) -> None:
        """Run one callback, or let time pass."""
        able = [owner for owner in self._owners if owner.ready and owner.frozen_until <= self._now]
        if not able:
            self._pass()
            return
        owner = able[self._rng.randrange(len(able))] if len(able) > 1 else able[0]
        ready = owner.ready
        handle = ready.pop(self._rng.randrange(len(ready)) if self.shuffled and len(ready) > 1 else 0)
        if not handle.cancelled():
            handle._run()

    def _pass(self) -> None:
        thaws = [owner.frozen_until for owner in self._owners if owner.ready]
        if not self._timers and not thaws:
            raise Stuck("nothing is left that could happen")
        self._now = min([*thaws, self._timers[0][0]] if self._timers else thaws, default=self._now)
        while self._timers and self._timers[0][0] <= self._now:
            _, _, handle, owner = heapq.heappop(self._timers)
            if not handle.cancelled():
                owner.ready.append(handle)

    def _end(self) -> None:
        """Let every task that is left end, those of killed processes too, so that none is found unfinished later."""
        for task in self._tasks:
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None and type(error).__module__ == "builtins" and not isinstance(error, OSError):
                self._on_fault(f"{task.get_name()} has ended", error)
        self.is_ending = True
        self._timers.clear()
        owners = [*self._owners, *self._killed]
        for _ in range(ROUNDS):
            left = [task for task in self._tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            while ready := [owner for owner in owners if owner.ready]:
                for handle in ready[0].ready:
                    if not handle.cancelled():
                        handle._run()
                ready[0].ready.clear()
        self._tasks.clear()
        self.close()
