"""Which sessions this process has found unreadable: each is told of once, however often it is asked for."""

from __future__ import annotations

import logging
from collections import OrderedDict

from app.errors import SessionUnreadable

log = logging.getLogger("turnlog.unreadable")

MOST = 10_000
"""Sessions that are remembered; one that was forgotten is told of again."""


class Unreadable:
    """The memory of a process."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, None] = OrderedDict()

    def tell(self, session_id: str, why: object) -> None:
        """A warning, unless there was one of this session."""
        if self._is_new(session_id):
            log.warning("session %s cannot be read: %s", session_id, why, extra={"session_id": session_id})

    def tell_of_group(self, group_id: str, why: object) -> None:
        """The same of a group, of which some session's head cannot be read."""
        if self._is_new(f"group {group_id}"):
            log.warning("group %s is left as it was: %s", group_id, why)

    def _is_new(self, name: str) -> bool:
        is_new = name not in self._told
        self._told[name] = None
        self._told.move_to_end(name)
        if len(self._told) > MOST:
            self._told.popitem(last=False)
        return is_new

    def error(self, session_id: str, why: object) -> SessionUnreadable:
        """What is answered to who asks for the session; told of."""
        self.tell(session_id, why)
        return SessionUnreadable(f"session {session_id} cannot be read: {why}")
