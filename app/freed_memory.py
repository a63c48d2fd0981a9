"""Gives the memory of large bodies back to the system. glibc keeps what was freed, in an arena a thread, until it is
told: without, a process stays as large as its largest bodies together have made it."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

LARGE = 4 << 20
"""Bytes of a request's bodies after which it is worth some milliseconds of a thread."""

WAIT_S = 1.0
"""Bodies that are released together are given back once."""

_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone


class FreedMemory:
    def __init__(self) -> None:
        self._waiting: asyncio.TimerHandle | None = None

    def released(self) -> None:
        """A request's LARGE bodies were released."""
        if self._waiting is None and _trim is not None:
            self._waiting = asyncio.get_running_loop().call_later(WAIT_S, self._give_back)

    def _give_back(self) -> None:
        self._waiting = None
        # On a thread: it waits for none, but takes a millisecond for each 100 MB.
        asyncio.get_running_loop().run_in_executor(None, _trim, 0)
