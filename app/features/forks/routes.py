"""The route that forks a session."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header
from pydantic import BaseModel, ConfigDict, Field

from app.api.creation import created
from app.api.parameters import SessionId
from app.api.requests import Request, require_finite, require_small
from app.api.routes import BODY, SESSION, WRITE, Routes, json_reply
from app.domain.canonical import digest
from app.domain.patterns import MAX_INTEGER, NO_NUL
from app.errors import IdempotencyMismatch, NotFound, RunClosed, RunOverBudget, SessionEnded
from app.features.forks.forks import ForkOrder, Forks
from app.sessions.lifecycle import made_session_id
from turnlog import replies as reply_types

route = Routes("Sessions")

MAX_FORKS = 64
"""The most sessions that one request creates."""


class ForkSession(BaseModel):
    """The body of `POST /sessions/{id}/fork`. Without `group_id` and `metadata`, the source's are used."""

    model_config = ConfigDict(extra="forbid", strict=True)

    turn: int = Field(ge=1, le=MAX_INTEGER)
    count: int = Field(default=1, ge=1, le=MAX_FORKS)
    group_id: str | None = Field(default=None, max_length=512, pattern=NO_NUL)
    metadata: dict[str, Any] | None = None
    parent_loss: bool = False


@route(
    "POST /sessions/{session_id}/fork",
    "Fork a session after one of its turns",
    "admin",
    json_reply(reply_types.ForkedSessions, "The new sessions, or those of an earlier request with the same key."),
    errors=(*BODY, *SESSION, NotFound, SessionEnded, RunClosed, RunOverBudget, IdempotencyMismatch, *WRITE),
    body=ForkSession,
    example={"turn": 2, "count": 4},
    of_run="session",
)
async def fork_session(
    request: Request,
    session_id: SessionId,
    idempotency_key: Annotated[
        str | None, Header(description="The same key again: the same sessions. Without one their ids are random.")
    ] = None,
) -> dict[str, Any]:
    """Create sessions that begin after a committed turn of this one, live or rolled back, open or closed.

    Forks restore tokens, not the state of a sandbox. Each new session is created in its own transaction. If a request
    fails halfway, repeat it with its key to create the rest.
    """
    app = request.services
    body = await request.body_of(ForkSession)
    require_finite(body.metadata, "metadata")
    require_small("metadata has", body.metadata)
    order = ForkOrder(session_id, body.turn, body.group_id, body.metadata, body.parent_loss)
    fork_ids = [_fork_id(session_id, idempotency_key, nth) for nth in range(body.count)]
    forks: Forks = app.features["forks"]
    await forks.fork(order, fork_ids)
    return {"sessions": [created(request, fork_id) for fork_id in fork_ids]}


def _fork_id(session_id: str, key: str | None, nth: int) -> str:
    """With a key the id is derived from the request, so that a retry finds the sessions of the first attempt."""
    if not key:
        return made_session_id()
    return digest(f"{session_id}\n{nth}\n{key}".encode())
