"""What a start does not need is imported when it is asked for: on a thread, so that others are served meanwhile."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


async def loaded(module: str) -> None:
    """Afterwards an import of it costs nothing.

    Also one that another thread is in the middle of, which `sys.modules` has already.
    """
    await asyncio.to_thread(importlib.import_module, module)


class LazyImport(Generic[T]):
    """Calling it gives what `make` made of a module, once and for all; `made` is that, None as long as nobody asked."""

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
