"""Notifies the requests that follow a session's log when it has grown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

POLL_S = 1.0
"""Interval in seconds at which a follower looks for events of other processes."""


class Followers:
    """The followers of each session's log in this process."""

    def __init__(self) -> None:
        self.stopping = False
        self._following: dict[str, set[asyncio.Event]] = {}

    def stop(self) -> None:
        """End all followers, since a stopping server waits for open replies."""
        self.stopping = True
        for session_id in self._following:
            self.notify(session_id)

    @contextlib.contextmanager
    def follow(self, session_id: str) -> Iterator[asyncio.Event]:
        """An event that is set when the session's log grows. Clear it before reading and wait for it afterwards."""
        changed = asyncio.Event()
        following = self._following.setdefault(session_id, set())
        following.add(changed)
        try:
            yield changed
        finally:
            following.discard(changed)
            if not following:
                self._following.pop(session_id, None)

    def notify(self, session_id: str) -> None:
        for changed in self._following.get(session_id, ()):
            changed.set()


async def wait_for_change(changed: asyncio.Event) -> None:
    """Wait until the event is set, at most POLL_S."""
    try:
        async with asyncio.timeout(POLL_S):
            await changed.wait()
    except TimeoutError:
        return
