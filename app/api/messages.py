"""The route of a session's conversation."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from app.api.describe import JSON, READ, describe, json_reply
from app.api.head import TOKEN_SESSION
from app.api.parameters import LIMIT, PageCursor, SessionId, require_known
from app.api.state import services
from app.domain.patterns import MAX_INTEGER
from app.errors import InvalidRequest, NotFound, SessionClosed, SessionNotFound, SessionUnreadable
from app.sessions.conversation import MAX_MESSAGES, Conversations
from turnlog import replies as reply_types

router = APIRouter(tags=["Sessions"])


class MessagesQuery(BaseModel):
    """Which messages, and from where."""

    branch: int | None = Field(
        default=None, ge=0, le=MAX_INTEGER, description="A branch's number; default: that of the newest turn."
    )
    turn: int | None = Field(
        default=None, ge=1, le=MAX_INTEGER, description="Only this turn's own messages; also a discarded turn's."
    )
    limit: int = Field(default=MAX_MESSAGES, ge=1, le=MAX_MESSAGES, description=LIMIT)
    cursor: PageCursor = None


@router.get("/sessions/{session_id}/messages")
@describe(
    "The conversation of a branch",
    "session",
    json_reply(reply_types.SaidPage, "A page of the conversation."),
    errors=(InvalidRequest, NotFound, SessionNotFound, SessionClosed, SessionUnreadable, *READ),
)
async def get_messages(request: Request, session_id: SessionId, query: Annotated[MessagesQuery, Query()]) -> Response:
    """The messages that led to a branch's newest turn, oldest first, of an open or closed session. A page ends early
    where it would have more than 8 MiB. A session's own token sees no rewards and no annotations."""
    require_known(request, MessagesQuery)
    said = await Conversations(services(request).database).page(
        session_id, query.branch, query.turn, query.cursor, query.limit, judged=TOKEN_SESSION not in request.scope
    )
    return Response(msgspec.json.encode(said), media_type=JSON)
