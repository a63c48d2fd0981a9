"""The service with a look at its event loop: `GET /lag` is by how much it came too late at worst, and begins anew.

An application of its own, so that it can be put around another commit's service as well.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from app.main import app as service

EVERY_S = 0.002


class Lagged:
    """The lag in milliseconds by the clock, and by what the process used of its CPU meanwhile."""

    def __init__(self) -> None:
        self._worst = [0.0, 0.0]
        self._looking: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            self._looking = asyncio.get_running_loop().create_task(self._look())
        if scope["type"] != "http" or scope["path"] != "/lag":
            await service(scope, receive, send)
            return
        body, self._worst = "{} {}".format(*self._worst).encode(), [0.0, 0.0]
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _look(self) -> None:
        while True:
            began, used = time.perf_counter(), time.process_time()
            await asyncio.sleep(EVERY_S)
            late = (time.perf_counter() - began - EVERY_S) * 1000
            busy = (time.process_time() - used) * 1000
            self._worst = [max(self._worst[0], late), max(self._worst[1], min(late, busy))]


app = Lagged()
