"""Stopping the process: on a signal, and when its database is lost."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType

log = logging.getLogger("turnlog")

_Handler = Callable[[int, FrameType | None], object]


def on_stop_signal(stop: Callable[[], None]) -> None:
    """Call `stop` on SIGINT and SIGTERM, before uvicorn's own handler, which waits until all replies are complete."""
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        uvicorn_handler = signal.getsignal(number)
        if not callable(uvicorn_handler):
            continue

        def handle(received: int, frame: FrameType | None, uvicorn_handler: _Handler = uvicorn_handler) -> None:
            loop.call_soon_threadsafe(stop)
            uvicorn_handler(received, frame)

        signal.signal(number, handle)


def end_without_store(reason: str) -> None:
    """Stop as on SIGTERM. A supervisor restarts the process, which opens the database as it is then."""
    log.critical("%s under this server: nothing more is written, and it ends", reason)
    signal.raise_signal(signal.SIGTERM)
