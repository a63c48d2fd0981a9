"""Sessions that this process has found unreadable: each is logged once, however often it is read."""

from __future__ import annotations

import logging
from collections import OrderedDict

from app.errors import SessionUnreadable

log = logging.getLogger("turnlog.unreadable")

MOST = 10_000
"""How many sessions are remembered; one that was forgotten is logged again."""


class Unreadable:
    def __init__(self) -> None:
        self._logged: OrderedDict[str, None] = OrderedDict()

    def warn(self, session_id: str, why: object) -> None:
        """Log a warning, unless there was one for this session."""
        if self._is_new(session_id):
            log.warning("session %s cannot be read: %s", session_id, why, extra={"session_id": session_id})

    def warn_of_group(self, group_id: str, why: object) -> None:
        """Log a warning for a group with an unreadable head."""
        if self._is_new(f"group {group_id}"):
            log.warning("group %s is left as it was: %s", group_id, why)

    def _is_new(self, name: str) -> bool:
        is_new = name not in self._logged
        self._logged[name] = None
        self._logged.move_to_end(name)
        if len(self._logged) > MOST:
            self._logged.popitem(last=False)
        return is_new

    def error(self, session_id: str, why: object) -> SessionUnreadable:
        """The error for a request for the session; also logs it."""
        self.warn(session_id, why)
        return SessionUnreadable(f"session {session_id} cannot be read: {why}")
