"""Imports modules at first use instead of at start-up, on a thread, so that the event loop goes on."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


async def loaded(module: str) -> None:
    """Import `module` on a thread and wait until it is complete.

    `sys.modules` also holds a module that another thread is still importing, so looking there is not enough.
    """
    await asyncio.to_thread(importlib.import_module, module)


class LazyImport(Generic[T]):
    """A call imports the module and returns the result of `make`, which runs once. `made` is None before that."""

    def __init__(self, module: str, make: Callable[[], T]) -> None:
        self._module = module
        self._make = make
        self.made: T | None = None

    async def __call__(self) -> T:
        if self.made is None:
            await loaded(self._module)
        if self.made is None:
            self.made = self._make()
        return self.made
