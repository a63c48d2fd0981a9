"""Routes of groups and of the training feed: list them, lease complete ones, and acknowledge them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, FailFast, Field
from starlette.responses import StreamingResponse

from app.api.parameters import LIMIT, Cursor
from app.api.replies import started
from app.api.requests import Request
from app.api.routes import BODY, NDJSON, READ, WRITE, Reply, Routes, json_reply
from app.domain.events import DEFAULT_RUN
from app.domain.patterns import ID, NO_NUL
from app.domain.selection import Selection
from app.errors import InvalidRequest, NotFound
from app.features.groups.feed import FeedQuery, Groups
from turnlog import replies as reply_types
from turnlog.rows import Acknowledged, LeasedGroup

route = Routes("Export")

OF_RUN = "The group's run. By default the default run, else the only run that has a group with this id."


class GroupListQuery(Selection):
    """Which groups to list, from where."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(default=100, ge=1, le=1000, description=LIMIT)
    cursor: Cursor = None


class Acknowledgement(BaseModel):
    """The body of `POST /export/groups/ack`."""

    model_config = ConfigDict(extra="forbid")

    consumer: str = Field(pattern=ID, strict=True)
    run: str = Field(default=DEFAULT_RUN, pattern=ID, strict=True)
    groups: Annotated[list[Annotated[str, Field(pattern=NO_NUL, strict=True)]], FailFast()]


@route(
    "GET /export/groups",
    "Lease complete groups to a consumer",
    "admin",
    Reply("One group per line; empty if there is none.", {NDJSON: LeasedGroup[dict[str, Any]]}),
    errors=(InvalidRequest, *WRITE),
    of_run="query",
)
async def hand_out(request: Request, query: Annotated[FeedQuery, Query()]) -> StreamingResponse:
    """Up to `size` complete groups as NDJSON, one per line, leased to the consumer before the first byte is sent."""
    return await started(await _groups(request).feed.hand_out(query), NDJSON)


@route(
    "GET /groups",
    "List groups, ordered by id",
    "page",
    json_reply(reply_types.GroupPage, "One page of groups."),
    errors=(InvalidRequest, *READ),
    of_run="query",
)
async def list_groups(request: Request, query: Annotated[GroupListQuery, Query()]) -> object:
    """Groups with their progress, the statistics of their rewards and their place in the training feed, by id."""
    return await _groups(request).listed.page(query, query.cursor, query.limit)


@route(
    "GET /groups/{group_id:path}",
    "A group's sessions, and the statistics of their rewards",
    "page",
    json_reply(reply_types.Group, "The group."),
    errors=(InvalidRequest, NotFound, *READ),
    of_run="query",
)
async def get_group(
    request: Request,
    group_id: Annotated[str, Path(pattern=NO_NUL, description="A group's id.")],
    run: Annotated[str | None, Query(pattern=ID, description=OF_RUN)] = None,
) -> Mapping[str, Any]:
    """A group's sessions, and the statistics of their rewards."""
    return await _groups(request).feed.group(group_id, run)


@route(
    "POST /export/groups/ack",
    "Mark groups as consumed, permanently",
    "admin",
    json_reply(Acknowledged, "The result for each group."),
    errors=(*BODY, *WRITE),
    body=Acknowledgement,
    example={"consumer": "trainer-0", "groups": ["task-17"]},
    of_run="body",
)
async def acknowledge(request: Request) -> dict[str, Any]:
    """Mark groups of a run as consumed, permanently. Returns the result for each group."""
    body = await request.body_of(Acknowledgement)
    outcome = await _groups(request).feed.acknowledge(body.consumer, body.run, body.groups)
    fields: dict[str, Any] = msgspec.to_builtins(outcome)
    return fields


def _groups(request: Request) -> Groups:
    groups: Groups = request.services.features["groups"]
    return groups
