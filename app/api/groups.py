"""Routes of the training feed: lease complete groups, and acknowledge them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, FailFast, Field

from app.api.bodies import body_of
from app.api.describe import BODY, NDJSON, READ, WRITE, Reply, describe, json_reply
from app.api.parameters import require_known
from app.api.path_names import ANY
from app.api.state import services, start_stream
from app.domain.patterns import ID, NO_NUL
from app.errors import InvalidRequest, NotFound
from app.export.feed import FeedQuery
from turnlog import replies as wire
from turnlog.rows import Acknowledged, LeasedGroup

router = APIRouter(tags=["Export"])


class Acknowledgement(BaseModel):
    """The body of `POST /export/groups/ack`."""

    model_config = ConfigDict(extra="forbid")

    consumer: str = Field(pattern=ID, strict=True)
    groups: Annotated[list[Annotated[str, Field(pattern=NO_NUL, strict=True)]], FailFast()]


@router.get("/export/groups")
@describe(
    "Lease complete groups to a consumer",
    "admin",
    Reply("One group a line; empty if there is none.", {NDJSON: LeasedGroup[dict[str, Any]]}),
    errors=(InvalidRequest, *WRITE),
)
async def hand_out(request: Request, query: Annotated[FeedQuery, Query()]) -> StreamingResponse:
    """Up to `size` complete groups as NDJSON, one a line, leased to the consumer before the first byte is sent."""
    require_known(request, FeedQuery)
    found, _ = await start_stream(await services(request).feed.hand_out(query))
    return StreamingResponse(found, media_type=NDJSON)


@router.get(f"/groups/{{group_id:{ANY}}}")
@describe(
    "A group's sessions, and the statistics of their rewards",
    "page",
    json_reply(wire.Group, "The group."),
    errors=(InvalidRequest, NotFound, *READ),
)
async def get_group(
    request: Request, group_id: Annotated[str, Path(pattern=NO_NUL, description="A group's id.")]
) -> Mapping[str, Any]:
    """A group's sessions, and the statistics of their rewards."""
    return await services(request).feed.group(group_id)


@router.post("/export/groups/ack")
@describe(
    "Mark groups as consumed, permanently",
    "admin",
    json_reply(Acknowledged, "The result for each group."),
    errors=(*BODY, *WRITE),
    body=Acknowledgement,
    example={"consumer": "trainer-0", "groups": ["task-17"]},
)
async def acknowledge(request: Request) -> dict[str, Any]:
    """Mark groups as consumed, permanently. Returns the result for each group."""
    body = await body_of(request, Acknowledgement)
    outcome = await services(request).feed.acknowledge(body.consumer, body.groups)
    found: dict[str, Any] = msgspec.to_builtins(outcome)
    return found
