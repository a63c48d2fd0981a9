"""How this process is told to end, and tells itself."""

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
    """Call `stop` when the process is told to end, before uvicorn, which waits for all replies to be whole."""
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        uvicorns = signal.getsignal(number)
        if not callable(uvicorns):
            continue

        def handle(received: int, frame: FrameType | None, uvicorns: _Handler = uvicorns) -> None:
            loop.call_soon_threadsafe(stop)
            uvicorns(received, frame)

        signal.signal(number, handle)


def end_without_store(reason: str) -> None:
    """As SIGTERM does; a supervisor starts the process anew, on the file that is there then."""
    log.critical("%s under this server: nothing more is written, and it ends", reason)
    signal.raise_signal(signal.SIGTERM)
