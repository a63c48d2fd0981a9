"""The route of a session's note and tags."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from app.api.bodies import body_of
from app.api.describe import BODY, SESSION, WRITE, describe, json_reply
from app.api.parameters import SessionId
from app.api.state import services
from app.domain.patterns import NO_NUL, TAG
from app.errors import InvalidRequest
from turnlog import replies as wire

router = APIRouter(tags=["Sessions"])

MAX_NOTE = 4000
"""Characters of a note. It stands in the session's row, which lists read."""

MAX_TAGS = 32

Tag = Annotated[str, Field(strict=True, pattern=TAG)]


class Note(BaseModel):
    """The body of `PUT /sessions/{id}/note`. A field that is absent or null changes nothing; an empty one removes."""

    model_config = ConfigDict(extra="forbid")

    note: str | None = Field(default=None, max_length=MAX_NOTE, pattern=NO_NUL, strict=True)
    tags: list[Tag] | None = Field(default=None, max_length=MAX_TAGS)


@router.put("/sessions/{session_id}/note")
@describe(
    "Write a note or tags on the session",
    "session",
    json_reply(wire.Noted),
    errors=(*BODY, *SESSION, *WRITE),
    body=Note,
    example={"note": "Loops on the same test.", "tags": ["loop", "look at"]},
)
async def put_note(request: Request, session_id: SessionId) -> dict[str, Any]:
    """Write a note or tags on the session, also a closed one. Each replaces what was there."""
    body = await body_of(request, Note)
    if body.note is None and body.tags is None:
        raise InvalidRequest("note or tags must be given")
    seq = await services(request).sessions.note(session_id, body.note, body.tags)
    return {"session_id": session_id, "seq": seq}
