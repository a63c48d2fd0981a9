"""Reads checkpoints for the page: the sessions in one, then and now, and those that have a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from app.api.checkpoints import fields
from app.errors import NotFound
from app.store import checkpoints
from app.store.checkpoints import InCheckpoint, SessionThen
from app.store.engine import Database


class CheckpointView(msgspec.Struct, frozen=True):
    """A checkpoint, as `GET /checkpoints` has it but without `erased`, and the next of its sessions by id. `cursor`
    continues; null: these were the last."""

    checkpoint: dict[str, Any]
    sessions: Sequence[SessionThen]
    cursor: str | None


class CheckpointViews:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, name: str, cursor: str | None, limit: int) -> CheckpointView:
        """Sessions after that of `cursor`. Raises NotFound, StoreUnavailable."""
        found = await self._database.read(lambda c: checkpoints.content(c, name, cursor or "", limit + 1))
        if found is None:
            raise NotFound(f"there is no checkpoint {name}")
        checkpoint, sessions = found
        shown = fields(checkpoint)
        del shown["erased"]  # GET /checkpoints counts it, which reads every row
        more = len(sessions) > limit
        return CheckpointView(shown, sessions[:limit], sessions[limit - 1].session_id if more else None)

    async def of_session(self, session_id: str) -> Sequence[InCheckpoint]:
        """The checkpoints that have the session, the oldest first. Raises StoreUnavailable."""
        return await self._database.read(lambda c: checkpoints.of_session(c, session_id))
