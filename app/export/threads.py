"""The threads on which exports make and write rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

COUNT = 2
"""One makes rows while the other writes. Each thread keeps freed memory to itself, so more would only cost memory."""


class Threads:
    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(COUNT, thread_name_prefix="export")

    async def run(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(call, *arguments, **named))
