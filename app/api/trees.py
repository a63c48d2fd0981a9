"""The route of a session's tree."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response

from app.api.describe import JSON, READ, describe, json_reply
from app.api.parameters import SessionId
from app.api.state import services
from app.domain.branches import Branches, Loss
from app.errors import InvalidRequest, SessionNotFound, SessionUnreadable
from app.sessions.tree_view import whole_tree
from turnlog import replies as reply_types

router = APIRouter(tags=["Sessions"])


@router.get("/sessions/{session_id}/tree")
@describe(
    "The session's turns as a tree",
    "session",
    json_reply(reply_types.Tree, "The tree."),
    errors=(InvalidRequest, SessionNotFound, SessionUnreadable, *READ),
)
async def get_tree(
    request: Request,
    session_id: SessionId,
    branches: Annotated[
        Branches | None, Query(description="The rows that `exported` and `loss_branches` are of, as in an export.")
    ] = None,
    loss: Annotated[Loss, Query(description="Whether each turn is in the loss of one row, or of every one.")] = "once",
) -> Response:
    """Turns and branches, and what an export with the same `branches` and `loss` makes of them; also of a closed or
    erased session. Nothing is read but the log, and how each branch's first message begins."""
    app = services(request)
    tree = await whole_tree(app.database, session_id, branches or app.picker or "kept", loss)
    return Response(msgspec.json.encode(tree), media_type=JSON)
