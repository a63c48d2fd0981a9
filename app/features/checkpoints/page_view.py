"""The page's view of a checkpoint: its sessions, then and now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import Query

from app.api.parameters import LIMIT, Cursor
from app.api.requests import Request
from app.api.routes import MOST_ROWS, Routes
from app.domain.events import DEFAULT_RUN
from app.errors import NotFound
from app.features.checkpoints import operations
from app.features.checkpoints.operations import SessionThen
from app.features.checkpoints.routes import Name, Run, fields

route = Routes("Page")


class CheckpointView(msgspec.Struct, frozen=True):
    """A checkpoint, as `GET /checkpoints` has it but without `erased`, and the next of its sessions by id; after the
    last `next_cursor` is null."""

    checkpoint: dict[str, Any]
    sessions: Sequence[SessionThen]
    next_cursor: str | None


@route.for_the_page("/checkpoints/{name}", of_run="query")
async def checkpoint(
    request: Request,
    name: Name,
    run: Run = DEFAULT_RUN,
    limit: Annotated[int, Query(ge=1, le=MOST_ROWS, description=LIMIT)] = 100,
    cursor: Cursor = None,
) -> object:
    """A checkpoint and its sessions, by id: the event that each had then, and what it is now."""
    read = request.services.database.read
    content = await read(lambda c: operations.content(c, run, name, cursor or "", limit + 1))
    if content is None:
        raise NotFound(f"there is no checkpoint {name}")
    checkpoint, sessions = content
    shown = fields(checkpoint)
    del shown["erased"]  # GET /checkpoints counts it, which reads every row
    more = len(sessions) > limit
    after = sessions[limit - 1].session_id if more else None
    return CheckpointView(shown, sessions[:limit], after)
