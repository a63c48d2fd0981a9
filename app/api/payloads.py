"""Routes of the object storage of replay payloads."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.bodies import body_of
from app.api.describe import ANYTHING, BODY, NOTHING, PAYLOADS, READ, WRITE, describe, json_reply
from app.api.state import services
from app.domain.patterns import ID, MAX_INTEGER
from app.errors import InvalidRequest
from app.store.packs.move import START

router = APIRouter(tags=["Payloads"])


class MoveAfter(BaseModel):
    """Where a step of a move goes on: `after` of the step before."""

    model_config = ConfigDict(extra="forbid", strict=True)

    session_id: str = Field(pattern=ID)
    fence: int = Field(ge=0, le=MAX_INTEGER)
    number: int = Field(ge=0, le=MAX_INTEGER)


class MovePayloads(BaseModel):
    """The body of `POST /payloads/move`; empty for the first step."""

    model_config = ConfigDict(extra="forbid", strict=True)

    after: MoveAfter | None = None


@router.post("/payloads/move")
@describe(
    "Move some replay payloads to where new ones go",
    "admin",
    json_reply(ANYTHING, "What was moved, and where the next step goes on; `after` is null at the end."),
    errors=(*BODY, *WRITE, *PAYLOADS),
    body=MovePayloads,
    example={},
)
async def move_payloads(request: Request) -> dict[str, Any]:
    """Move the next replay payloads to where `TURNLOG_PAYLOADS` puts new ones, from the database into object storage or
    back. Repeat with `after` of the reply until it is null; turns go on meanwhile."""
    after = (await body_of(request, MovePayloads, is_optional=True)).after
    step = await services(request).mover.step(START if after is None else (after.session_id, after.fence, after.number))
    names = MoveAfter.model_fields
    return {
        "moved": step.moved,
        "lost": step.lost,
        "bytes": step.bytes,
        "after": None if step.after is None else dict(zip(names, step.after, strict=True)),
    }


@router.post("/payloads/adopt", status_code=204)
@describe(
    "Make this store the owner of its place in object storage",
    "admin",
    NOTHING,
    errors=(InvalidRequest, *READ, *PAYLOADS),
)
async def adopt_payloads(request: Request) -> Response:
    """After a restore: no other store uses this place any more, so that what nothing refers to may be deleted there."""
    collector = services(request).collector
    if collector is None:
        raise InvalidRequest("there is no object storage: neither TURNLOG_PAYLOADS nor TURNLOG_PAYLOADS_FROM is set")
    await collector.adopt()
    return Response(status_code=204)
